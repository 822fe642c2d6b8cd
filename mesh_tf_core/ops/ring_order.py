"""The steps of a ring: the distance of keys, their direction, and which steps form one loop (see
`ops.ring`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True)
class Turn:
    """A turn of a ring, or a loop of turns.

    Attributes:
      step: distance that keys have come, in the first step of a loop.
      way: 1 if they come from previous devices, -1 if from following ones.
      both: a query sees keys on either side; otherwise only devices count whose keys did not pass the end of
        the ring.
      whole: no window hides them from the devices that count.
      times: number of steps in a loop.
      number: the value that counts the steps of a loop.
      closes: True for the last step of its direction.
      last: nothing is sent on.
    """

    step: int
    way: int = 1
    both: bool = False
    whole: bool = True
    times: int = 1
    number: int | None = None
    closes: bool = False
    last: bool = False


def turns_of(count: int, size: int, causal: bool, window: int) -> list[Turn]:
    """The turns that bring every device all keys that its queries see, each once.

    With r pieces in reach, r turns bring keys from before. For a device behind the end of the ring, they come
    from n - step places away; the remaining following pieces come in the other direction.

    Args:
      count: n, devices; `size`: positions of a piece.
      causal, window: as of `Attending`.
    """
    reach = min(count - 1, -((1 - window) // size)) if window else count - 1
    behind = 0 if causal else min(reach, count - 1 - reach)

    def turn(step: int, way: int) -> Turn:
        both = not causal and way > 0 and count - step <= reach
        far = max(step, count - step) if both else step
        return Turn(step, way, both, not window or (far + 1) * size <= window)

    found: list[Turn] = []
    for way, steps in ((1, reach), (-1, behind)):
        if steps:
            *others, end = (turn(step, way) for step in range(1, steps + 1))
            found += [*_looped(others), replace(end, closes=True)]
    return [*found[:-1], *(replace(turn, last=True) for turn in found[-1:])]


def _looped(turns: Iterable[Turn]) -> Iterable[Turn]:
    """The same, those that follow each other and are alike as one."""
    for (whole, _), run in groupby(turns, key=lambda turn: (turn.whole, turn.both)):
        first, *more = run
        if whole:
            yield replace(first, times=1 + len(more))
        else:
            yield from (first, *more)
