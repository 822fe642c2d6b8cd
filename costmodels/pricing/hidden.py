"""What of a step's communication is priced as hidden, behind what, and how much of that there is.

The hidden part of a collective is a fraction of its own time (`costmodels.pricing.overlap`), so that prices
add up. Here the whole step is at hand: what can run meanwhile follows from the order of its phases, and a
price that hides more than that is too low.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from costmodels.pricing.items import HOST
from costmodels.pricing.lines import Cost, Line
from costmodels.pricing.overlap import ACTIVATION, GRADIENT, PARAMETER, RING

_BACKWARD = ("backward", "recompute")
BEHIND: dict[str, tuple[str, tuple[str, ...]]] = {
    GRADIENT: ("backward, from where they are made", _BACKWARD),
    PARAMETER: ("forward and backward", ("forward", *_BACKWARD)),
    RING: ("attention and products of the turn", ()),
    HOST: ("products of the layer", ()),
    ACTIVATION: ("nothing: what follows waits", ()),
}
"""Class of communication -> what runs meanwhile, in words and as phases of the step; without phases it is
known of each message."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """One class of communication, in seconds of a step.

    Attributes:
      seconds, hidden: of all its messages, and what of that is priced as hidden.
      behind: what runs meanwhile.
      room: how long that takes.
    """

    purpose: str
    seconds: float
    hidden: float
    behind: str
    room: float

    @property
    def exposed(self) -> float:
        """What the step waits for."""
        return self.seconds - self.hidden

    @property
    def fits(self) -> bool:
        """Whether what runs meanwhile takes as long as what is hidden."""
        return self.hidden <= self.room * (1 + 1e-9)


def hidden(cost: Cost) -> list[Hidden]:
    """The classes that a step has, the longest first."""
    found = [_of(purpose, lines, cost) for purpose, lines in _classes(cost)]
    return sorted(found, key=lambda h: -h.seconds)


def _classes(cost: Cost) -> Iterator[tuple[str, list[Line]]]:
    groups: dict[str, list[Line]] = {}
    for x in cost.lines:
        if x.is_communication:
            groups.setdefault(HOST if x.axes == (HOST,) else x.purpose or ACTIVATION, []).append(x)
    yield from groups.items()


def _of(purpose: str, lines: Sequence[Line], cost: Cost) -> Hidden:
    behind, phases = BEHIND[purpose]
    seconds = sum(x.seconds * x.times for x in lines)
    covered = seconds - sum(x.exposed * x.times for x in lines)
    compute = (x for x in cost.lines if not x.is_communication and x.origin.phase in phases)
    room = sum(x.seconds * x.times for x in compute) if phases else covered
    return Hidden(purpose, seconds, covered, behind, room)
