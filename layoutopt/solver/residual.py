"""The rest of a join tree as a separate problem: fewer variables, choices and assignments.

The use of rows, as vectors over the rows of relations, so that a price makes them costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.form import (
    Choices,
    ChoiceVariable,
    CostTable,
    Floats,
    Ints,
    Problem,
    ResourceRow,
    RowTerm,
    Scope,
    Sparse,
    Term,
)
from layoutopt.solver.join_tree import JoinTree, Relation, TablesByScope, every, match


@dataclass(frozen=True, eq=False)
class ResourceUsage:
    """The rows (limits) of a problem over its relations.

    Attributes:
      tables: per number of a relation, (limits, its rows) their use.
      limits: (limits,) minus the use of all choices.
    """

    tables: dict[int, Floats]
    limits: Floats

    @property
    def scales(self) -> Floats:
        """(limits,) how large the numbers are that add up to a use: rounding is relative to it."""
        most = [np.abs(table).max(axis=1, initial=0.0) for table in self.tables.values()]
        return np.abs(self.limits) + np.sum(most, axis=0) + np.finfo(float).tiny


def uses(
    rows: Sequence[ResourceRow], tables: TablesByScope, sizes: Sequence[int], most: int
) -> ResourceUsage | None:
    """The uses of `rows`; `tables` gets the scopes of their entries too. None if they have more than `most`
    numbers.

    An entry whose scope is inside that of a table allows what the table allows there.
    """
    limits = np.array([row.limit for row in rows], float)
    alike: dict[tuple[Scope, int], list[tuple[int, CostTable]]] = {}
    for number, row in enumerate(rows):
        for entry in row.entries:
            table = entry.table
            # Entries of one origin share their assignments.
            origin = entry.scope, id(table.assignments) if isinstance(table, Sparse) else 0
            alike.setdefault(origin, []).append((number, table))
    cells = 0
    for scope in {tuple(sorted(scope)): None for scope, _ in alike if scope}:
        if scope not in tables:
            hosts = [r for known, (r, _) in tables.items() if set(scope) <= set(known)]
            if not hosts and math.prod(sizes[v] for v in scope) > most:
                return None
            found = min(hosts, key=len).onto(scope) if hosts else every(scope, sizes)
            tables[scope] = found, np.zeros(len(found))
        cells += len(tables[scope][0]) * len(rows)
    if cells > most:
        return None
    counted: dict[int, Floats] = {}
    numbers = {scope: number for number, scope in enumerate(tables)}
    for (scope, _), members in alike.items():
        relation = tables[tuple(sorted(scope))][0] if scope else Relation((), np.zeros((1, 0), np.int64))
        which = np.array([number for number, _ in members])
        added = _along(relation, scope, [table for _, table in members])
        if scope:
            total = counted.setdefault(numbers[relation.scope], np.zeros((len(rows), len(relation))))
            np.add.at(total, which, added)
        else:
            np.subtract.at(limits, which, added[:, 0])
    return ResourceUsage(counted, limits)


def _along(relation: Relation, scope: Scope, alike: Sequence[CostTable]) -> Floats:
    """(tables, rows of the relation) the values of tables over one scope that list the same assignments."""
    order, first = np.argsort(scope), alike[0]
    if not isinstance(first, Sparse):
        dense = np.stack([np.transpose(table, order) for table in alike if not isinstance(table, Sparse)])
        return dense[(slice(None), *relation.cells.T)].reshape(len(alike), -1)
    mine, others = match(relation, Relation(relation.scope, first.assignments[:, order])).pairs
    found = np.zeros((len(alike), len(relation)))
    found[:, mine] = np.stack([t.values for t in alike if isinstance(t, Sparse)])[:, others]
    return found


@dataclass(frozen=True, eq=False)
class ResidualProblem:
    """A problem over some choices of another's variables.

    Attributes:
      kept: per variable of the other, its choices that are left.
      free: the variables of the other problem that are those of `problem`; the rest have one choice.
    """

    problem: Problem
    kept: tuple[Ints, ...]
    free: tuple[int, ...]

    @staticmethod
    def whole(problem: Problem) -> ResidualProblem:
        """All of a problem."""
        sizes = problem.sizes
        return ResidualProblem(problem, tuple(np.arange(size) for size in sizes), tuple(range(len(sizes))))

    def lift(self, choices: Sequence[int]) -> Choices:
        """The other problem's choices."""
        found = [int(kept[0]) for kept in self.kept]
        for v, choice in zip(self.free, choices, strict=True):
            found[v] = int(self.kept[v][choice])
        return tuple(found)

    def project(self, choices: Sequence[int]) -> Choices:
        """The choices here that are nearest to the other problem's."""
        pairs = ((self.kept[v], choices[v]) for v in self.free)
        return tuple(min(int(np.searchsorted(kept, choice)), len(kept) - 1) for kept, choice in pairs)


def rest(
    problem: Problem,
    tree: JoinTree,
    values: Sequence[Floats],
    rows: Sequence[ResourceRow],
    used: ResourceUsage,
    constant: float,
) -> ResidualProblem:
    """The rest of `problem`: an exact `tree` of its relations with their costs, its `rows` with their
    `used`."""
    kept: list[Ints] = [np.zeros(0, np.int64)] * len(problem.sizes)
    for bucket in tree.buckets:
        kept[bucket.variable] = np.unique(bucket.choices)
    free = [v for v, choices in enumerate(kept) if len(choices) > 1]
    number = {v: k for k, v in enumerate(free)}
    terms: list[Term] = []
    entries: list[list[RowTerm]] = [[] for _ in rows]
    for k, relation in enumerate(tree.relations):
        left = tree.left(k)
        mine = [v for v in relation.scope if v in number]
        columns = relation.columns(mine)[left].T
        cells = [np.searchsorted(kept[v], column) for v, column in zip(mine, columns, strict=True)]
        listed = np.stack(cells, axis=1) if cells else np.zeros((1, 0), np.int64)
        scope: Scope = tuple(number[v] for v in mine)
        if values[k][left].any() or len(listed) < math.prod(len(kept[v]) for v in mine):
            terms.append(Term(scope, Sparse(listed, values[k][left])))
        for row, counted in enumerate(used.tables.get(k, np.zeros((0, 0)))):
            if counted[left].any():
                entries[row].append(RowTerm(scope, Sparse(listed, counted[left])))
    variables = tuple(ChoiceVariable(problem.variables[v].name, len(kept[v])) for v in free)
    limited = zip(rows, used.limits.tolist(), entries, strict=True)
    smaller = tuple(ResourceRow(row.name, limit, tuple(found)) for row, limit, found in limited)
    left_over = Problem(problem.name, variables, tuple(terms), smaller, constant=constant)
    return ResidualProblem(left_over, tuple(kept), tuple(free))
