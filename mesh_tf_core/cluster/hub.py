"""The place in worker 0 where the processes of a job meet, and where it is noticed that one is missing.

Every process, worker 0 too, keeps one connection to it and says every second what it is doing. The hub passes
values round, and gives the first failure to everybody in words that name who is to blame.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mesh_tf_core.cluster.lines import Lines
from mesh_tf_core.cluster.members import Members
from mesh_tf_core.errors import UserError

BEAT = 1.0
"""Seconds between two signs of life."""
SILENCE = 10.0
"""Seconds without one after which a process counts as frozen or cut off."""
PATIENT = 3600.0
"""Seconds that processes wait at most for something that may take long, as a search."""


@dataclass
class _Seen:
    """What is known about a process."""

    lines: Lines
    heard: float
    doing: str = "starting"
    since: float = 0.0

    def state(self, now: float) -> str:
        lasting = now - self.since
        return self.doing if lasting < SILENCE else f"{self.doing} for {lasting:.0f} s"


@dataclass
class _Round:
    """Values that are being collected."""

    began: float
    patient: bool
    values: dict[int, Any] = field(default_factory=dict)


class Hub(threading.Thread):
    """See the module.

    Args:
      timeout: seconds that processes wait for the last one to bring its value to a round.
      start_timeout: seconds that they wait for the last one to come.

    Raises:
      UserError: the port is in use.
    """

    def __init__(self, members: Members, timeout: float, start_timeout: float) -> None:
        super().__init__(name="cluster hub", daemon=True)
        self.members, self.timeout = members, timeout
        self.start_timeout, self.began = start_timeout, time.monotonic()
        self._seen: dict[int, _Seen] = {}
        self._rounds: dict[str, _Round] = {}
        self._failure: str | None = None
        self._looked = self.began
        self._left: set[int] = set()
        self._stopping = False
        self._begun: dict[int, int] = {}
        host, port = members.meeting_point
        self._waiting = selectors.DefaultSelector()
        try:
            self._door = socket.create_server(("", port), backlog=len(members.addresses))
        except OSError as error:
            raise UserError(
                f"cluster: worker 0 cannot listen on port {port} of {host} ({error.strerror}); "
                "is another job running there?"
            ) from None
        self._waiting.register(self._door, selectors.EVENT_READ)

    def run(self) -> None:
        while len(self._left) < len(self.members.addresses):
            for key, _ in self._waiting.select(BEAT):
                if key.fileobj is self._door:
                    self._welcome()
                else:
                    self._listen(key.data)
            self._look_round()
        for seen in self._seen.values():
            seen.lines.close()
        self._door.close()

    # -- what arrives ----------------------------------------------------------------------------------------

    def _welcome(self) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError:  # it has gone again
            return
        lines = Lines(connection)
        self._waiting.register(lines, selectors.EVENT_READ, lines)

    def _listen(self, lines: Lines) -> None:
        index = next((i for i, seen in self._seen.items() if seen.lines is lines), None)
        messages = lines.receive()
        if messages is None:
            self._waiting.unregister(lines)
            lines.close()
            if index is not None:
                self._gone(index)
            return
        for message in messages:
            if index is None:
                index = self._joined(lines, message)
            else:
                self._heard(index, message)

    def _joined(self, lines: Lines, message: Mapping[str, Any]) -> int | None:
        index, job = message.get("join"), message.get("job")
        if job != self.members.job or index not in range(len(self.members.addresses)):
            lines.send(failure=f"{self.members.name(0)} runs another job")
            return None
        assert isinstance(index, int)
        if index in self._seen:
            self._fail(f"{self.members.name(index)} was started again; the job starts anew with all workers")
            lines.send(failure=f"{self.members.name(0)} still ran the job that this process had left")
            return None
        now = time.monotonic()
        self._seen[index] = _Seen(lines, now, since=now)
        if self._failure is not None:
            lines.send(failure=self._failure)
        return index

    def _heard(self, index: int, message: Mapping[str, Any]) -> None:
        seen, now = self._seen[index], time.monotonic()
        seen.heard = now
        if "doing" in message:
            seen.doing, seen.since = str(message["doing"]), now - float(message["for"])
        if "round" in message:
            key = str(message["round"])
            found = self._rounds.setdefault(key, _Round(now, bool(message["patient"])))
            found.values[index] = message["value"]
            if len(found.values) == len(self.members.addresses):
                del self._rounds[key]
                self._tell(round=key, values=[v for _, v in sorted(found.values.items())])
        if "stop" in message and not self._stopping:
            self._stopping = True
            self._tell(stop=True)
        if "begun" in message:
            self._begun[index] = int(message["begun"])
            if len(self._begun) == len(self.members.addresses):
                self._tell(last=max(self._begun.values()))
        if "failed" in message:
            self._fail(f"{self.members.name(index)} failed: {message['failed']}")
        if "overdue" in message:
            self._overdue(index, str(message["overdue"]), seen.doing)
        if "left" in message:
            self._left.add(index)

    def _gone(self, index: int) -> None:
        if index not in self._left:
            self._left.add(index)
            state = self._seen[index].state(time.monotonic())
            self._fail(f"{self.members.name(index)} was lost: its process ended (last heard: {state})")

    # -- what does not ---------------------------------------------------------------------------------------

    def _look_round(self) -> None:
        now, everyone = time.monotonic(), range(len(self.members.addresses))
        if now - self._looked < BEAT:
            return
        self._looked = now
        self._tell(beat=True)
        absent = [i for i in everyone if i not in self._seen]
        if absent and now - self.began > self.start_timeout:
            self._fail(f"{self._names(absent)} did not come within {self.start_timeout:.0f} s")
            self._left.update(absent)
        for index, seen in self._seen.items():
            if index not in self._left and now - seen.heard > SILENCE:
                self._left.add(index)
                self._fail(
                    f"{self.members.name(index)} was lost: no sign of life for {SILENCE:.0f} s, it is frozen "
                    f"or cut off (last heard: {seen.doing})"
                )
        for key, found in self._rounds.items():
            limit = PATIENT if found.patient else self.timeout
            if not absent and now - found.began > limit:
                late = [i for i in everyone if i not in found.values]
                states = ", ".join(self._seen[i].state(now) for i in late[:3])
                self._fail(
                    f"{self._names(late)} did not come to {key.partition(' ')[2]} "
                    f"within {limit:.0f} s ({states})"
                )

    def _overdue(self, index: int, what: str, doing: str) -> None:
        """A process waited too long for others: those that do something else are to blame."""
        now = time.monotonic()
        late = [i for i, seen in self._seen.items() if i != index and seen.doing != doing]
        if late:
            states = ", ".join(self._seen[i].state(now) for i in late[:3])
            self._fail(f"{self._names(late)} did not come to {what} in time ({states})")
        else:
            self._fail(
                f"{self.members.name(index)} waited too long in {what} while every other worker is "
                "there too; is a connection between workers blocked, or the step longer than the timeout?"
            )

    def _names(self, indices: Iterable[int]) -> str:
        first, *more = [self.members.name(i) for i in indices]
        return ", ".join([first, *more[:3]]) + (f" and {len(more) - 3} more" if len(more) > 3 else "")

    # -- what everybody hears --------------------------------------------------------------------------------

    def _fail(self, text: str) -> None:
        """Only the first failure counts: the others follow from it."""
        if self._failure is None:
            self._failure = text
            self._tell(failure=text)

    def _tell(self, **message: Any) -> None:
        """Worker 0 is told last: when it knows, everybody does."""
        for index, seen in sorted(self._seen.items(), reverse=True):
            if index not in self._left:
                seen.lines.send(**message)
