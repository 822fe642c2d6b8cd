"""Changing which axes split a value's dimensions, by the cheapest sequence of slices, all-to-alls and
all-gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.layout import Axes


@dataclass(frozen=True)
class Move:
    """One step: `slice`, `gather` or `exchange` of `axes`, on dimension `dim` (for exchange: from `source` to
    `dim`)."""

    kind: str
    dim: int
    axes: Axes
    source: int = -1


def plan_moves(have: Sequence[Axes], want: Sequence[Axes]) -> list[Move]:
    """Steps from the splits `have` to `want`, both per dimension.

    Axes are taken off from the minor end and put on at the minor end, since a piece of a piece is only
    contiguous there. Slices come first (they are free and shrink what follows), then all-to-alls (an axis
    that moves from one dimension to another), then all-gathers, then the slices that had to wait for them.
    """
    now = [list(a) for a in have]
    moves: list[Move] = []

    def used() -> set[str]:
        return {a for axes in now for a in axes}

    def slices() -> bool:
        done = False
        for d, target in enumerate(want):
            kept = len(now[d])
            if tuple(now[d]) == tuple(target[:kept]):
                fresh: list[str] = []
                for axis in target[kept:]:
                    if axis in used():
                        break
                    fresh.append(axis)
                    now[d].append(axis)
                if fresh:
                    moves.append(Move("slice", d, tuple(fresh)))
                    done = True
        return done

    def exchange() -> bool:
        for d, target in enumerate(want):
            kept = len(now[d])
            if tuple(now[d]) != tuple(target[:kept]) or kept == len(target):
                continue
            axis = target[kept]
            for s, axes in enumerate(now):
                if s != d and axes and axes[-1] == axis and not _keeps(axes, want[s]):
                    axes.pop()
                    now[d].append(axis)
                    moves.append(Move("exchange", d, (axis,), s))
                    return True
        return False

    def gather() -> bool:
        for d, target in enumerate(want):
            extra = len(now[d]) - _common(now[d], target)
            if extra > 0:
                axes = tuple(now[d][-extra:])
                del now[d][-extra:]
                moves.append(Move("gather", d, axes))
                return True
        return False

    while [tuple(a) for a in now] != [tuple(a) for a in want]:
        if not (slices() or exchange() or gather()):
            raise AssertionError(f"no way from {have} to {list(want)}")
    return moves


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _keeps(axes: Sequence[str], target: Axes) -> bool:
    return tuple(axes) == tuple(target[: len(axes)])
