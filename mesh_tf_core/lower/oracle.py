"""Memoised queries of a lowering: sizes and order of the mesh, rows of its table.

Everything else in a program follows from the graph and from which axes split which dimension; their names do
not matter. If all queries have the same answers on another mesh, for other placements, or with other names of
axes, the program is therefore the same except for its mesh.

Changes the axes that split a value's dimensions, with the cheapest sequence of slices, all-to-alls and
all-gathers.

Axes are taken off and put on at the minor end of a dimension, since a piece of a piece is only contiguous
there. The cost of a step is the bytes that a device sends (`program.wire_bytes`), so the cheapest sequence is
a shortest path over the possible splits (Dijkstra 1959); among equally cheap sequences, one with the fewest
messages is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.values import Splits
from mesh_tf_core.lower.placement import Placement, Row
from mesh_tf_core.lower.storage import BETWEEN, STATE, VARIABLE

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


Question = tuple[Any, ...]
"""A method of `Oracle` and its arguments."""
Answers = tuple[tuple[Question, Any], ...]


class Oracle:
    """Answers the questions of one lowering, and notes them.

    Args:
      placement: where values live.
      known: name -> sizes of dimensions that the layout is known to divide; these need no query.
      real: the real names of the mesh's axes, which decide between equally cheap moves.
      apart: axes of replicas, which nothing is moved over.

    Attributes:
      asked: every query so far, with its answer.
      shards: the state of a variable may be split further than in the layout.
    """

    def __init__(
        self,
        placement: Placement,
        known: Mapping[str, Set[int]] | None = None,
        real: Mapping[str, str] | None = None,
        apart: Axes = (),
    ) -> None:
        self.placement, self.known, self.real, self.apart = placement, known or {}, real, apart
        self.mesh, self.layout = placement.mesh, placement.layout
        self.shards = bool(placement.stages)
        self.asked: dict[Question, Any] = {}
        self._answers: dict[Question, Any] = {}

    @classmethod
    def of(cls, program: Program) -> Oracle:
        """The queries about a program's mesh only."""
        return cls(Placement(program.mesh, program.layout, {}))

    def _ask(self, *question: Any) -> Any:
        if question not in self.asked:
            self.asked[question] = self._answer(question)
        return self.asked[question]

    def _answer(self, question: Question) -> Any:
        if question not in self._answers:
            self._answers[question] = self._worked_out(*question)
        return self._answers[question]

    def _worked_out(self, what: str, *about: Any) -> Any:
        if what == "row":
            return self.placement.row(*about)
        if what == "ways":
            return self.mesh.group_size(about[0])
        if what == "divides":
            return about[0] % self.mesh.group_size(about[1]) == 0
        if what == "spare":
            return tuple(a for a, n in self.mesh.axes if n > 1 and a not in {*about[0], *self.apart})
        if what == "ordered":
            return tuple(a for a in self.mesh.names if a in about[0])
        return self._moves(*about)

    def _moves(
        self, have: Splits, want: Splits, sizes: tuple[int, ...], within: Axes
    ) -> tuple[Relayout, ...]:
        named = {a for splits in (have, want) for split in splits for a in split}
        own = tuple((a, n) for a, n in self.mesh.axes if a in named or a not in (*within, *self.apart))
        if self.real is None:
            return plan_moves(have, want, sizes, own)
        real = self.real
        here = {name: ours for ours, name in real.items()}
        axes = tuple((real[a], n) for a, n in own)
        there = [tuple(tuple(real[a] for a in split) for split in splits) for splits in (have, want)]
        moves = plan_moves(there[0], there[1], sizes, axes)
        return tuple(m._replace(axes=tuple(here[a] for a in m.axes)) for m in moves)

    def agree(self, answers: Iterable[tuple[Question, Any]]) -> bool:
        """True if the answers to all these questions would be the same here."""
        return all(self._answer(question) == answer for question, answer in answers)

    def row(self, what: str, name: str, phase: str) -> Row:
        """A row of where values live (see `Placement.row`)."""
        row: Row = self._ask("row", what, name, phase)
        return row

    def stored(self, variable: Variable) -> Row:
        """The storage of a variable (or an optimizer's slot) between steps."""
        if variable.slot_of is not None:
            return self.row(STATE, variable.slot_of, BETWEEN)
        return self.row(VARIABLE, variable.name, BETWEEN)

    def ways(self, axes: Axes) -> int:
        """Number of devices in a group over some axes."""
        return int(self._ask("ways", axes)) if axes else 1

    def ordered(self, axes: Iterable[str]) -> Axes:
        """Axes in the order of the mesh."""
        found = frozenset(axes)
        if len(found) < 2:
            return tuple(found)
        ordered: Axes = self._ask("ordered", found)
        return ordered

    def spare(self, used: Iterable[str]) -> Axes:
        """The axes of several devices that are unused, in the order of the mesh."""
        found: Axes = self._ask("spare", frozenset(used))
        return found

    def divides(self, dim: Dim, axes: Axes) -> bool:
        """True if a dimension can be split over some axes of the layout."""
        if not axes or ((sizes := self.known.get(dim.name)) and dim.size in sizes):
            return True
        return self.divides_evenly(dim, axes)

    def divides_evenly(self, dim: Dim, axes: Axes) -> bool:
        """True if a dimension can be split over any axes."""
        return bool(self._ask("divides", dim.size, axes))

    def moves(
        self, have: Splits, want: Splits, sizes: tuple[int, ...], within: Axes = ()
    ) -> tuple[Relayout, ...]:
        """The cheapest steps from some splits of a value to others.

        Args:
          within: axes along which devices hold separate values, over which nothing is exchanged.
        """
        simple = straight(have, want)
        if simple is not None:
            return simple
        found: tuple[Relayout, ...] = self._ask("moves", have, want, sizes, within)
        return found
