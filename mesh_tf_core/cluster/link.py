"""A process's connection to the hub: says what the process does, hears what happened to others."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mesh_tf_core.cluster.hub import BEAT, SILENCE
from mesh_tf_core.cluster.lines import Lines
from mesh_tf_core.cluster.members import Members
from mesh_tf_core.errors import ClusterError

RETRY = 0.1
"""Seconds between two knocks at the hub's door."""
END = "the end"
"""The round after which every process leaves."""


class Link(threading.Thread):
    """See the module. Once the job has failed, every method raises what happened.

    Args:
      failed: called once, in this thread, with the text of the job's failure.
    """

    def __init__(self, members: Members, failed: Callable[[str], None]) -> None:
        super().__init__(name="cluster link", daemon=True)
        self.members, self.failure = members, ""
        self._failed = failed
        self._lines: Lines | None = None
        self._doing, self._since = "starting", time.monotonic()
        self._rounds = itertools.count()
        self._values: dict[str, list[Any]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._asks = self._stopping = False
        self._begun = 0
        self._last: int | None = None

    def connect(self, timeout: float) -> None:
        """Knocks until the hub answers.

        Raises:
          ClusterError: it does not within `timeout` seconds.
        """
        until, where = time.monotonic() + timeout, self.members.meeting_point
        while True:
            try:
                self._lines = Lines(socket.create_connection(where, timeout=max(RETRY, min(5.0, timeout))))
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise ClusterError(
                        f"{self.members.name(0)} does not answer on port {where[1]} within {timeout:.0f} s "
                        f"({error.strerror or error}); is it running, and is that port open?"
                    ) from None
                time.sleep(RETRY)
        self._lines.send(join=self.members.index, job=self.members.job)
        self.start()

    # -- what the process says -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """What other processes are told while they wait for this one."""
        self._doing, self._since = f"in {what}", time.monotonic()
        yield
        self._doing, self._since = f"after {what}", time.monotonic()

    def round(self, what: str, value: Any, patient: bool = False) -> list[Any]:
        """Every process's value (what JSON holds), by index; all must call it in the same order.

        Args:
          what: for the message if one does not come.
          patient: wait long for a process that lives.
        """
        key = f"{next(self._rounds)} {what}"
        self._beat(round=key, value=value, patient=patient)
        with self._changed:
            self._changed.wait_for(lambda: self.failure or key in self._values)
            self.check()
            return self._values.pop(key)

    def report(self, text: str) -> None:
        """Tells everybody that this process fails."""
        self._beat(failed=text)
        self.settle(SILENCE / 2)

    def overdue(self, what: str) -> None:
        """Tells the hub that others did not come to `what` in time; it finds out who."""
        self._beat(overdue=what)

    def settle(self, seconds: float) -> str:
        """Waits for the job's failure to become known; its text, or nothing if it does not."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, seconds)
        return self.failure

    def check(self) -> None:
        """Raises ClusterError if the job has failed."""
        if self.failure:
            raise ClusterError(self.failure)

    def leave(self) -> None:
        """Ends the connection in peace."""
        self._beat(left=True)
        self._closed = True

    # -- an end after the same step --------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Asks all processes to end after the same step, soon; may be called by a signal's handler."""
        self._asks = True

    def begins(self, step: int) -> bool:
        """Says that this process begins a step, unless all are to end before it.

        A collective needs every process, so none may end before a step that another has begun. From the
        moment at which each is asked what it has begun, it begins nothing until the last such step is known.
        """
        with self._changed:
            if self._stopping:
                self._changed.wait_for(lambda: self.failure or self._last is not None)
            self.check()
            if self._last is not None and step > self._last:
                return False
            self._begun = max(self._begun, step)
            return True

    def _beat(self, **more: Any) -> None:
        if self._lines is not None:
            now = time.monotonic()
            self._lines.send(doing=self._doing, **{"for": now - self._since}, **more)

    # -- what it hears ---------------------------------------------------------------------------------------

    def run(self) -> None:
        assert self._lines is not None
        waiting = selectors.DefaultSelector()
        waiting.register(self._lines, selectors.EVENT_READ)
        heard = awake = time.monotonic()
        while not self._closed:
            self._beat(**({"stop": True} if self._asks and not self._stopping else {}))
            arrived = bool(waiting.select(BEAT))
            awake, before = time.monotonic(), awake
            if awake - before > SILENCE:
                self._fail(f"{self.members.name(self.members.index)} stood still for {awake - before:.0f} s")
            elif arrived:
                heard = awake
                self._receive()
            elif awake - heard > SILENCE:
                self._fail(
                    f"{self.members.name(0)} was lost: no sign of life for {SILENCE:.0f} s, it is frozen or "
                    "cut off"
                )
        waiting.close()
        self._lines.close()

    def _receive(self) -> None:
        assert self._lines is not None
        messages = self._lines.receive()
        if messages is None:
            self._fail(f"{self.members.name(0)} was lost: its process ended")
            self._closed = True
        for message in messages or ():
            self._heard(message)

    def _heard(self, message: Any) -> None:
        if "failure" in message:
            self._fail(str(message["failure"]))
        if "stop" in message:
            with self._changed:
                self._stopping, begun = True, self._begun
            self._beat(begun=begun)
        if "last" in message:
            with self._changed:
                self._last = int(message["last"])
                self._changed.notify_all()
        if "round" in message:
            # Worker 0 may be gone before this process's other threads run again.
            self._closed = message["round"].endswith(f" {END}")
            with self._changed:
                self._values[message["round"]] = message["values"]
                self._changed.notify_all()

    def _fail(self, text: str) -> None:
        if self._closed or self.failure:
            return
        with self._changed:
            self.failure = text
            self._changed.notify_all()
        self._failed(text)
