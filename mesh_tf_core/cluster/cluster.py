"""One process's part in a job of several: who the others are, whether they live, what they agree on."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from mesh_tf_core.cluster.hub import Hub
from mesh_tf_core.cluster.link import END, Link
from mesh_tf_core.cluster.members import endpoint, explicit, from_environment
from mesh_tf_core.errors import ClusterError

GRACE = 10.0
"""Seconds that a process has to end by itself once the job has failed."""


class Cluster(contextlib.AbstractContextManager["Cluster"]):
    """The processes that run one program together; every one of them makes this object, and uses it as a
    context.

    A process that is lost, frozen or late ends the whole job: `ClusterError` says which one, in every other
    process, and a process that has not ended `GRACE` seconds later (since it waits in a library) is ended.
    Nothing waits for ever.

    Args:
      addresses: HOST:PORT of every process, the same list everywhere; by default those of TF_CONFIG. Worker 0
        also listens on the next free port (`Members.meeting_point`), where the processes watch each other.
      index: which of the addresses is this process.
      devices_per_process: checked against the mesh, if given.
      timeout: seconds that the others wait for a process that lives but does not come to a collective.
      start_timeout: seconds that the others wait for one that has not started yet.

    Attributes:
      members: addresses and this process's index.
      is_writer: whether this process writes what is written once, as checkpoints.

    Raises:
      UserError: the addresses, or TF_CONFIG, are missing or malformed.
    """

    def __init__(
        self,
        addresses: Sequence[str] | None = None,
        index: int | None = None,
        *,
        devices_per_process: int | None = None,
        timeout: float = 120.0,
        start_timeout: float = 300.0,
    ) -> None:
        self.members = (
            from_environment() if addresses is None else explicit(addresses, index, devices_per_process)
        )
        self.timeout, self.start_timeout = timeout, start_timeout
        self.is_writer = self.members.index == 0
        self._aborts: list[Callable[[str], None]] = []
        self._link: Link | None = None
        self._ended = threading.Event()

    # -- coming and going ------------------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        return self._link is not None

    def join(self) -> None:
        """Waits until every process is there.

        Raises:
          ClusterError: one did not come; it is named.
          UserError: worker 0's port is in use.
        """
        if self._link is not None:
            return
        if self.is_writer:
            Hub(self.members, self.timeout, self.start_timeout).start()
        self._link = Link(self.members, self._failed)
        self._link.connect(self.start_timeout)
        self.gather("the start", None, patient=True)
        atexit.register(self._at_exit)

    def reach(self) -> None:
        """Waits until every process listens on its port, and tries all of them.

        Raises:
          ClusterError: two of them cannot reach each other; both are named.
        """
        self.gather("the start of the servers", None)
        here = self.members.name(self.members.index)
        shut = [
            f"{here} cannot reach {self.members.name(i)}"
            for i, address in enumerate(self.members.addresses)
            if not _answers(address)
        ]
        found = [text for texts in self.gather("the check of connections", shut) for text in texts]
        if found:
            raise ClusterError(f"{found[0]}; is that port open between the two machines?")

    def close(self, error: BaseException | None = None) -> None:
        """Leaves: with the others, or because of an error, which they are told."""
        link, self._link = self._link, None
        if link is None:
            return
        try:
            if link.failure:
                return
            if error is None:
                link.round(END, None, patient=True)
            else:
                link.report(_text(error))
        finally:
            self._ended.set()
            link.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def _at_exit(self) -> None:
        with contextlib.suppress(ClusterError):
            self.close(getattr(sys, "last_value", None))

    # -- while it runs ---------------------------------------------------------------------------------------

    def gather(self, what: str, value: Any, patient: bool = False) -> list[Any]:
        """Every process's value, by index. All processes must call it, in the same order.

        Args:
          what: says in messages what is waited for.
          value: what JSON holds.
          patient: wait up to an hour for a process that lives, not `timeout` seconds.
        """
        return self._joined().round(what, value, patient)

    def share(self, what: str, make: Callable[[], Any]) -> Any:
        """What worker 0 makes, for all; it may take its time."""
        return self.gather(what, make() if self.is_writer else None, patient=True)[0]

    def same(self, what: str, value: Any) -> None:
        """Raises ClusterError unless `value` is equal in all processes."""
        values = self.gather(what, value, patient=True)
        for i, other in enumerate(values):
            if other != values[0]:
                raise ClusterError(
                    f"{what} differs: {values[0]!r} in {self.members.name(0)}, {other!r} in "
                    f"{self.members.name(i)}; give every process the same command and the same files"
                )

    def ask_to_stop(self) -> None:
        """Asks all processes to end after the same step (`begins`); a handler of signals may call it."""
        if self._link is not None:
            self._link.ask_to_stop()

    def begins(self, step: int) -> bool:
        """Whether all processes go on with a step, which this one is about to begin; the same answer in all.
        False once any of them asked to stop."""
        return self._joined().begins(step)

    def doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """What the others are told if they have to wait for this process meanwhile."""
        return self._joined().doing(what)

    def check(self) -> None:
        """Raises ClusterError if the job has failed."""
        self._joined().check()

    def on_failure(self, abort: Callable[[str], None]) -> None:
        """`abort(text)` is called, in another thread, when the job fails: it wakes what waits for others."""
        self._aborts.append(abort)

    def explain(self, waited_for: str, late: bool) -> ClusterError:
        """The job's failure, after a library said that its part of it failed.

        Args:
          waited_for: where this process waited for others.
          late: it waited until its time was over.
        """
        link = self._joined()
        if late:
            link.overdue(waited_for)
        text = link.settle(GRACE) or "other processes cannot be reached, though all give signs of life"
        here = self.members.name(self.members.index)
        return ClusterError(text if waited_for in text else f"{text}; {here} waited in {waited_for}")

    def _joined(self) -> Link:
        if self._link is None:
            raise ClusterError("this process is not part of the job: it has not joined, or has left")
        return self._link

    def _failed(self, text: str) -> None:
        """Ends what waits for others, then the process if need be."""
        # The last resort, also while Python ends: no thread of ours runs then.
        signal.alarm(int(2 * GRACE))
        for abort in self._aborts:
            abort(text)
        if not self._ended.wait(GRACE):
            print(f"error: {text}", file=sys.stderr, flush=True)
            os._exit(ClusterError.exit_code)


def _answers(address: str) -> bool:
    try:
        socket.create_connection(endpoint(address), timeout=10.0).close()
    except OSError:
        return False
    return True


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped"
    said = " ".join(str(error).split())
    return said if isinstance(error, ClusterError) and said else f"{type(error).__name__}: {said[:500]}"
