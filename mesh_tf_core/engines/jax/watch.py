"""Heartbeats between the processes of a job: each knows the activity of the others, and which one is
missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SILENCE = 10.0
"""Seconds without a sign of life after which a process counts as lost."""
PATIENT = 3600.0
"""Seconds that processes wait at most for something that may take long, as compiling."""


@dataclass(frozen=True)
class Doing:
    """The current action of a process.

    Attributes:
      what: description, valid since the time `since` of this process's clock.
      place: number of operations with all processes that it has begun.
      patient: whether it may take long.
    """

    what: str
    since: float
    place: int = 0
    patient: bool = True

    def told(self) -> list[Any]:
        """The action in a form for processes with another clock."""
        return [self.what, time.monotonic() - self.since, self.place, self.patient]


@dataclass(frozen=True)
class _Heard:
    """The last sign of life of another process: its number, and when it came."""

    number: int
    at: float
    doing: Doing


class Watch:
    """One process's book of them all.

    Args:
      others: numbers of the other processes.
      timeout: seconds to wait for another process that is alive but does not arrive.

    Attributes:
      own: activity of this process.
    """

    def __init__(self, others: Iterable[int], timeout: float) -> None:
        now = time.monotonic()
        self.own, self._timeout, self._answered = Doing("starting", now), timeout, now
        self._heard = {i: _Heard(-1, now, Doing("starting", now)) for i in others}

    def does(self, what: str, places: int, patient: bool) -> None:
        """This process starts another activity, `places` further."""
        self.own = Doing(what, time.monotonic(), self.own.place + places, patient)

    def hears(self, states: Mapping[int, Sequence[Any]]) -> None:
        """The service returned the newest heartbeat of each process: its counter, then `Doing.told`. One that
        is not newer than the last, as one that somebody recorded and wrote again, is none."""
        self._answered = now = time.monotonic()
        for i, (number, what, seconds, place, patient) in states.items():
            if i in self._heard and number > self._heard[i].number:
                self._heard[i] = _Heard(number, now, Doing(what, now - seconds, place, patient))

    def starts_anew(self) -> None:
        """No process counts as silent so far."""
        self._answered = now = time.monotonic()
        self._heard = {i: _Heard(heard.number, now, heard.doing) for i, heard in self._heard.items()}

    def missing(self, name: Callable[[int], str]) -> str:
        """The missing processes, in words; '' if there are none."""
        now, own = time.monotonic(), self.own
        if now - self._answered > SILENCE:
            return f"{name(0)} was lost: its coordination service has not responded for {SILENCE:.0f} s"
        for i, heard in list(self._heard.items()):
            doing, lasting = heard.doing.what, now - heard.doing.since
            if lasting >= SILENCE:
                doing += f" for {lasting:.0f} s"
            if self._answered - heard.at > SILENCE:  # while nobody answers, nobody can be heard
                return (
                    f"{name(i)} was lost: no heartbeat for {SILENCE:.0f} s, because it ended, hangs or "
                    f"is disconnected (its last known activity: {doing})"
                )
            limit = PATIENT if heard.doing.patient or own.patient else self._timeout
            if heard.doing.place < own.place and own.what.startswith("in ") and now - own.since > limit:
                return (
                    f"{name(i)} did not reach {own.what.removeprefix('in ')} within {limit:.0f} s (the "
                    f"process is alive, its activity: {doing}); if this is expected, raise --timeout"
                )
        return ""
