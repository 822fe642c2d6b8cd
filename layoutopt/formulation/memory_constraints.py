"""Memory rows of the integer program: what every point of a step holds (`memory_points`), as tables over the
decisions.

Loops that run again hold other values at other points, so every set of them has rows of its own, which hold
nothing where it is not chosen. Copies that only some layouts need are not counted, so a row never forbids a
layout that fits; `lazy_cuts` adds them where they matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from layoutopt.formulation.memory_points import Key, Sizes
from layoutopt.formulation.memory_shares import Shares
from layoutopt.formulation.shared import SharedContext
from layoutopt.problem import Entry, Row, Sparse
from layoutopt.space.decisions import Decisions
from layoutopt.space.recompute import recompute_name
from mesh_tf_core.ir.mesh import Mesh


class MemoryConstraints:
    """The rows of one problem, for every set of loops that may run again.

    Args:
      names: the decisions with a choice, in the order of the problem's variables.
      fuses: the compiler makes kernels of several operations.
    """

    def __init__(
        self,
        context: SharedContext,
        mesh: Mesh,
        decided: Decisions,
        names: Sequence[str],
        fuses: bool = False,
    ) -> None:
        self.context, self.dependencies, self.fuses = context, context.dependencies, fuses
        self.decided, self.names = decided, tuple(names)
        self.always = decided.read({})[1].recompute
        self.shares = Shares(context.graph, mesh, decided, names)
        self._made: dict[frozenset[str], tuple[Row, ...]] = {}
        self._largest: dict[Entry, float] = {}

    def rows(self, again: frozenset[str] = frozenset()) -> tuple[Row, ...]:
        """One row for every point of the step that no other point dominates; they hold nothing where a loop
        of `again` does not run again. No limits are set."""
        again |= self.always
        if again not in self._made:
            found = self.context.points(again, self.fuses).largest
            rows = (self._only(self._row(name, sizes), again - self.always) for name, sizes in found)
            self._made[again] = tuple(rows)
        return self._made[again]

    def point(
        self, again: frozenset[str], node: int, phase: str, choices: Sequence[int]
    ) -> tuple[Row, dict[Key, float]] | None:
        """The row of the point at which a node runs, and what is counted there under some choices besides
        the variables; None if there is no such point. (Of several, the one that holds most.)"""
        points = self.context.points(again | self.always, self.fuses)
        found = [
            (self._row(f"memory at {p.name} #{p.position}", points.holds(p)), p)
            for p in points.trace
            if (p.node, p.phase) == (node, phase)
        ]
        if not found:
            return None
        row, point = max(found, key=lambda f: f[0].use(choices))
        counted = {key: self._row("", sizes).use(choices) for key, sizes in points.parts(point).items()}
        return self._only(row, again - self.always), counted

    def _row(self, name: str, sizes: Sizes) -> Row:
        return Row(name, math.inf, tuple(self.shares.entry(*each) for each in sizes))

    def _only(self, row: Row, again: frozenset[str]) -> Row:
        """The row, made useless for choices that do not run these loops again."""
        if not again:
            return row
        most = sum(map(self._most, row.entries))
        gates = []
        for dim in sorted(again):
            options = self.decided.options[recompute_name(dim)]
            table = np.array([0.0 if choice else -most for choice in options])
            gates.append(Entry((self.names.index(recompute_name(dim)),), table))
        name = f"{row.name} with {', '.join(sorted(again))} again"
        return replace(row, name=name, entries=(*row.entries, *gates))

    def _most(self, entry: Entry) -> float:
        if entry not in self._largest:
            values = entry.table.values if isinstance(entry.table, Sparse) else entry.table
            self._largest[entry] = float(values.max(initial=0.0))
        return self._largest[entry]
