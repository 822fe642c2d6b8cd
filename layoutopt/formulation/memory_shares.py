"""The part of a value that a device holds, for every assignment of the decisions that it depends on."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.formulation.memory_transients import Holds, Moves
from layoutopt.formulation.tables import assignments
from layoutopt.problem import Entry, Sparse
from layoutopt.space.decisions import Decisions
from layoutopt.space.kind import Choice
from layoutopt.space.storage import storage_class
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.storage import shard_layout, stage_number
from mesh_tf_core.tracing.graph import Graph

Share = tuple[tuple[int, ...], np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """What a value's bytes depend on.

    Attributes:
      names: its dimensions.
      variable: the variable whose storage class matters, with the stage from which it is split further.
      loop: the recompute decision that makes it disappear.
      gathered: a whole copy that exists only from the stage on.
      absent: stages at which it does not exist.
      unless: dimensions that make it disappear when they are split.
      rivals: shapes and bytes of an element of values whose place it may take, where it is of their size.
      replaced: disappears once a whole copy of it is gathered.
      moves: not a value, but what a node holds besides its operands and results.
    """

    names: tuple[str, ...]
    variable: str | None = None
    stage: int = 0
    loop: str | None = None
    gathered: bool = False
    absent: tuple[int, ...] = ()
    unless: tuple[str, ...] = ()
    rivals: tuple[tuple[Shape, int], ...] = ()
    replaced: bool = False
    moves: Moves | None = None


Columns = Mapping[str, np.ndarray]
"""Decision -> the number of its option in every assignment."""


class Shares:
    """Tables of shares, remembered: entries of equal use are one object."""

    def __init__(self, graph: Graph, mesh: Mesh, decided: Decisions, names: Sequence[str]) -> None:
        self.graph, self.mesh, self.decided = graph, mesh, decided
        self.number = {n: i for i, n in enumerate(names)}
        self._shares: dict[tuple[Kind, Shape], Share] = {}
        self._entries: dict[tuple[Kind, Shape, int], Entry] = {}
        self._listed: dict[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]], np.ndarray] = {}
        self._parts: dict[Hashable, float] = {}
        self._moved: dict[tuple[Moves, tuple[Choice, ...]], Holds] = {}

    def entry(self, kind: Kind, shape: Shape, size: int) -> Entry:
        """Bytes for every assignment of the decisions that matter. `size`: bytes in all, or per element of
        `shape`."""
        known = self._entries.get((kind, shape, size))
        if known is None:
            if (kind, shape) not in self._shares:
                self._shares[kind, shape] = self._share(kind, shape)
            scope, listed, shares = self._shares[kind, shape]
            known = Entry(scope, Sparse(listed, shares * (size * shape.size)))
            self._entries[kind, shape, size] = known
        return known

    def _share(self, kind: Kind, shape: Shape) -> Share:
        """The part of the whole that a device holds, for every assignment; what lowering refuses is left
        out."""
        if kind.moves:
            return self._besides(kind.moves)
        variable = self.graph.variables[kind.variable] if kind.variable else None
        dims = variable.shape.names if variable else kind.names
        wanted = [*dims, *kind.unless, *(n for shape_, _ in kind.rivals for n in shape_.names)]
        if variable:
            wanted.append(storage_class(variable))
        if kind.loop:
            wanted.append(kind.loop)
        free = tuple(n for n in dict.fromkeys(wanted) if n in self.number)
        listed = self._assignments(free, (dims,))
        columns = dict(zip(free, listed.T, strict=True))
        if variable is None:
            held = 1.0 / self._ways(kind.names, columns, len(listed))
        else:
            held = self._stored(kind, variable, shape, columns, len(listed))
        held[self._gone(kind, columns, len(listed))] = 0.0
        legal = ~np.isnan(held)
        return tuple(self.number[n] for n in free), listed[legal], held[legal]

    def _besides(self, moves: Moves) -> Share:
        """Bytes that a node holds besides its operands and results, for every assignment."""
        moved = tuple(n for n in moves.dims if n in self.number)
        cases = self._assignments(moved, moves.shapes)
        held = [self._held(moves, dict(zip(moved, case, strict=True))) for case in cases.tolist()]
        others = dict.fromkeys(n for found in held for names in found for n in names)
        free = (*moved, *(n for n in others if n in self.number))
        listed = self._assignments(free, moves.shapes)
        columns = dict(zip(free, listed.T, strict=True))
        size = np.zeros(len(listed))
        for case, found in zip(cases, held, strict=True):
            there = (listed[:, : len(moved)] == case).all(axis=1)
            for names, bytes_ in found.items():
                size += np.where(there, bytes_ / self._ways(names, columns, len(listed)), 0.0)
        return tuple(self.number[n] for n in free), listed, size

    def _held(self, moves: Moves, case: Mapping[str, int]) -> Holds:
        """What is held under one choice for the dimensions that data are moved along."""
        splits = {n: self._choices(n)[case.get(n, 0)] for n in moves.dims}
        key = moves, tuple(splits.values())
        if key not in self._moved:
            self._moved[key] = moves.holds(self.graph, self.mesh, splits)
        return self._moved[key]

    def _assignments(self, free: tuple[str, ...], shapes: tuple[tuple[str, ...], ...]) -> np.ndarray:
        """The numbers of the chosen options, of shape (assignments, decisions)."""
        if (free, shapes) not in self._listed:
            options = self.decided.options
            place = [{c: i for i, c in enumerate(options[n])} for n in free]
            found = [
                [of[c] for of, c in zip(place, chosen, strict=True)]
                for chosen in assignments(free, shapes, options)
            ]
            self._listed[free, shapes] = np.array(found, np.int64).reshape(len(found), len(free))
        return self._listed[free, shapes]

    def _choices(self, name: str) -> Sequence[Choice]:
        """What a decision may be, also where nothing is to be decided."""
        return self.decided.options[name] if name in self.number else (self.decided.fixed.get(name, ()),)

    def _each(self, name: str, values: Sequence[int], columns: Columns, count: int) -> np.ndarray:
        """The value that goes with the chosen option, for every assignment."""
        return np.array(values)[columns[name] if name in columns else np.zeros(count, np.int64)]

    def _ways(self, names: Sequence[str], columns: Columns, count: int) -> np.ndarray:
        """Into how many pieces a value of some dimensions is split."""
        found = np.ones(count, np.int64)
        for n in names:
            found *= self._each(n, [self.mesh.group_size(c) for c in self._choices(n)], columns, count)
        return found

    def _gone(self, kind: Kind, columns: Columns, count: int) -> np.ndarray:
        """Where it does not exist, or lies in another value's memory."""
        gone = np.zeros(count, bool)
        for n in (*kind.unless, *((kind.loop,) if kind.loop else ())):
            gone |= self._each(n, [bool(c) for c in self._choices(n)], columns, count)
        if kind.rivals:
            own, *others = (
                element * shape.size // self._ways(shape.names, columns, count)
                for shape, element in kind.rivals
            )
            gone |= np.any([own == other for other in others], axis=0)
        if kind.absent and kind.variable:
            gone |= np.isin(self._stages(kind.variable, columns, count), kind.absent)
        return gone

    def _stages(self, variable: str, columns: Columns, count: int) -> np.ndarray:
        name = storage_class(self.graph.variables[variable])
        numbers = [stage_number(c[0]) if c else 0 for c in self._choices(name)]
        return self._each(name, numbers, columns, count)

    def _stored(
        self, kind: Kind, variable: Variable, shape: Shape, columns: Columns, count: int
    ) -> np.ndarray:
        """The part of a value that lies as its variable does; NaN where lowering refuses that."""
        dims = [n for n in variable.shape.names if n in columns]
        further = self._stages(variable.name, columns, count) >= kind.stage
        about = variable.shape, variable.stacked, shape, kind.gathered, kind.replaced
        held = np.empty(count)
        assigned = zip(further.tolist(), *(columns[n].tolist() for n in dims), strict=True)
        for i, (split, *chosen) in enumerate(assigned):
            key = (about, split, *chosen)
            if key not in self._parts:
                choices = {n: self.decided.options[n][c] for n, c in zip(dims, chosen, strict=True)}
                self._parts[key] = self._part(kind, variable, shape, self.decided.read(choices)[0], split)
            held[i] = self._parts[key]
        return held

    def _part(self, kind: Kind, variable: Variable, shape: Shape, layout: Layout, split: bool) -> float:
        """As `_stored`, for one layout."""
        try:
            further = shard_layout(variable, layout, self.mesh) if split else layout
            moved = further.splits(variable.shape, "") != layout.splits(variable.shape, "")
            if (kind.gathered and not moved) or (kind.replaced and moved):
                return 0.0
            splits = (layout if kind.gathered else further).splits(shape, "value")
        except LayoutError:
            return math.nan
        return 1.0 / self.mesh.group_size(a for axes in splits for a in axes)
