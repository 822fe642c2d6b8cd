"""Changes the axes that split a value's dimensions, with the cheapest sequence of slices, all-to-alls and
all-gathers.

Axes are taken off and put on at the minor end of a dimension, since a piece of a piece is only contiguous
there. The cost of a step is the bytes that a device sends (`program.wire_bytes`), so the cheapest sequence is
a shortest path over the possible splits (Dijkstra 1959); among equally cheap sequences, one with the fewest
messages is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.values import Splits

MoveCost = tuple[float, int, int]
NEVER: MoveCost = (math.inf, 0, 0)
SPARE = 2
"""Dimensions that neither side splits and that may still hold an axis for a moment (two dimensions that
swap)."""


class Relayout(NamedTuple):
    """One step: `slice`, `gather` or `exchange` of `axes`, on dimension `dim` (exchange: from `source` to
    it)."""

    kind: str
    dim: int
    axes: Axes
    source: int = -1


@lru_cache(maxsize=1 << 16)
def plan_moves(
    have: Splits, want: Splits, sizes: tuple[int, ...], axes: tuple[tuple[str, int], ...]
) -> tuple[Relayout, ...]:
    """The cheapest steps from the splits `have` to `want`, both per dimension.

    Args:
      sizes: of the dimensions; a step may split one only where it divides.
      axes: the mesh's axes and their sizes.
    """
    ways = dict(axes)
    simple = straight(have, want)
    if simple is not None:
        return simple
    named = {a for side in (have, want) for split in side for a in split}
    movable = [a for a in ways if (ways[a] > 1 or a in named) and not _stays(have, want, a)]
    usable = _usable(have, want, sizes)
    start: MoveCost = (0.0, 0, 0)
    best: dict[Splits, MoveCost] = {have: start}
    came: dict[Splits, tuple[Splits, Relayout]] = {}
    queue: list[tuple[MoveCost, Splits]] = [(start, have)]
    while queue:
        cost, now = heapq.heappop(queue)
        if now == want:
            return tuple(_merged(_path(came, have, want)))
        if cost > best[now]:
            continue
        for step, after, bytes in _steps(now, movable, usable, sizes, ways):
            messages = cost[1] + (step.kind != "slice")
            total = (cost[0] + bytes, messages, cost[2] + 1)
            if total < best.get(after, NEVER) and total < best.get(want, NEVER):
                best[after] = total
                came[after] = (now, step)
                heapq.heappush(queue, (total, after))
    raise AssertionError(
        f"no sequence of collectives changes the layout {have} into {want}; please report this bug"
    )


@lru_cache(maxsize=1 << 14)
def straight(have: Splits, want: Splits) -> tuple[Relayout, ...] | None:
    """Only slices, or only gathers: nothing is cheaper, because a device gets exactly the bytes that it
    lacks. None if that does not lead there."""
    pairs = list(zip(have, want, strict=True))
    if all(new[: len(old)] == old for old, new in pairs):
        return tuple(
            Relayout("slice", d, new[len(old) :]) for d, (old, new) in enumerate(pairs) if new != old
        )
    if all(old[: len(new)] == new for old, new in pairs):
        return tuple(
            Relayout("gather", d, old[len(new) :]) for d, (old, new) in enumerate(pairs) if new != old
        )
    return None


def _steps(
    now: Splits, movable: Sequence[str], usable: Sequence[int], sizes: Sequence[int], ways: dict[str, int]
) -> Iterator[tuple[Relayout, Splits, float]]:
    """Every step from `now`: what it is, where it leads, and the bytes sent (of a value of one byte in
    all)."""
    used = {a for axes in now for a in axes}
    pieces = [math.prod([ways[a] for a in axes]) for axes in now]
    local = 1.0 / math.prod(pieces)
    for d in usable:
        for axis in movable:
            if axis not in used and sizes[d] % (pieces[d] * ways[axis]) == 0:
                yield Relayout("slice", d, (axis,)), _with(now, d, (*now[d], axis)), 0.0
        n = 1
        for count in range(1, len(now[d]) + 1):
            kept, moved = now[d][:-count], now[d][-count:]
            if moved[0] not in movable:
                break
            n *= ways[moved[0]]
            without = _with(now, d, kept)
            yield Relayout("gather", d, moved), without, (n - 1) * local
            for to in usable:
                if to != d and sizes[to] % (pieces[to] * n) == 0:
                    after = _with(without, to, (*now[to], *moved))
                    yield Relayout("exchange", to, moved, d), after, (n - 1) / n * local


def _usable(have: Splits, want: Splits, sizes: Sequence[int]) -> list[int]:
    """Dimensions that are split before or after, and the largest of the others."""
    touched = [d for d in range(len(have)) if have[d] or want[d]]
    spare = sorted((d for d in range(len(have)) if d not in touched), key=lambda d: -sizes[d])
    return sorted((*touched, *spare[:SPARE]))


def _stays(have: Splits, want: Splits, axis: str) -> bool:
    """Whether an axis and all more major ones on its dimension stay where they are."""
    place = _place(have, axis)
    if place is None or place != _place(want, axis):
        return False
    return have[place[0]][: place[1]] == want[place[0]][: place[1]]


def _place(splits: Splits, axis: str) -> tuple[int, int] | None:
    for d, axes in enumerate(splits):
        if axis in axes:
            return d, axes.index(axis)
    return None


def _with(splits: Splits, d: int, axes: Axes) -> Splits:
    return (*splits[:d], axes, *splits[d + 1 :])


def _path(came: dict[Splits, tuple[Splits, Relayout]], have: Splits, want: Splits) -> list[Relayout]:
    moves = []
    while want != have:
        want, step = came[want]
        moves.append(step)
    return moves[::-1]


def _merged(moves: Sequence[Relayout]) -> list[Relayout]:
    """Slices of one dimension that follow each other as one."""
    out: list[Relayout] = []
    for move in moves:
        if out and out[-1].kind == move.kind == "slice" and out[-1].dim == move.dim:
            out[-1] = out[-1]._replace(axes=(*out[-1].axes, *move.axes))
        else:
            out.append(move)
    return out
