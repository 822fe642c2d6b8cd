"""Lists of assignments and their natural joins: the combinations of choices that sparse tables allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.form import Bools, Floats, Ints, Scope

LARGEST_CODE = 1 << 62


@dataclass(frozen=True, eq=False)
class Relation:
    """Distinct assignments, (rows, variables), of the variables of `scope`, which rise."""

    scope: Scope
    cells: Ints

    def __len__(self) -> int:
        return len(self.cells)

    def columns(self, scope: Sequence[int]) -> Ints:
        """(rows, scope) the choices of some of its variables."""
        return self.cells[:, [self.scope.index(v) for v in scope]]

    def onto(self, scope: Scope) -> Relation:
        """The distinct assignments of some of its variables."""
        cells = self.columns(scope)
        return Relation(scope, cells[np.unique(codes(cells), return_index=True)[1]])


TablesByScope = dict[Scope, tuple[Relation, Floats]]
"""The allowed assignments of each scope, and the cost of each row."""


@dataclass(frozen=True, eq=False)
class Matches:
    """The rows of a second relation that agree with each row of a first one: `order[low:high]`."""

    low: Ints
    high: Ints
    order: Ints

    @property
    def count(self) -> int:
        """Rows of the join."""
        return int((self.high - self.low).sum())

    @property
    def pairs(self) -> tuple[Ints, Ints]:
        """(rows of the first, rows of the second) that agree, in the first's order."""
        counts = self.high - self.low
        first = np.repeat(np.arange(len(counts)), counts)
        skipped = np.repeat(self.low - (np.cumsum(counts) - counts), counts)
        return first, self.order[np.arange(len(first)) + skipped]


def match(first: Relation, second: Relation) -> Matches:
    """The rows that agree in all variables that both have."""
    shared = [v for v in first.scope if v in second.scope]
    both = codes(np.concatenate([first.columns(shared), second.columns(shared)]))
    mine, others = both[: len(first)], both[len(first) :]
    order = np.argsort(others, kind="stable")
    ranked = others[order]
    return Matches(np.searchsorted(ranked, mine, "left"), np.searchsorted(ranked, mine, "right"), order)


def agree(first: Relation, second: Relation) -> Bools:
    """The rows of a relation that agree with a row of a second one in all variables that both have."""
    matches = match(first, second)
    return matches.low < matches.high


def join(first: Relation, second: Relation, pairs: tuple[Ints, Ints]) -> Relation:
    """All assignments that agree with both, by the `pairs` of their match."""
    mine, others = pairs
    scope = tuple(sorted({*first.scope, *second.scope}))
    cells = np.empty((len(mine), len(scope)), np.int64)
    for k, v in enumerate(scope):
        known = v in first.scope
        relation, rows = (first, mine) if known else (second, others)
        cells[:, k] = relation.cells[rows, relation.scope.index(v)]
    return Relation(scope, cells)


def codes(cells: Ints) -> Ints:
    """(rows,) a number for every row: equal for equal rows, rising in lexicographic order."""
    found, most = np.zeros(len(cells), np.int64), 1
    for column in cells.T:
        size = int(column.max(initial=0)) + 1
        if most * size >= LARGEST_CODE:
            found, most = np.unique(found, return_inverse=True)[1], len(cells)
        found = found * size + column
        most *= size
    return found


def every(scope: Scope, sizes: Sequence[int]) -> Relation:
    """All assignments of some variables."""
    shape = [sizes[v] for v in scope]
    return Relation(scope, np.indices(shape).reshape(len(shape), -1).T)
