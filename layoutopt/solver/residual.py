"""The rest of a join tree as a separate problem: fewer variables, choices and assignments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.form import (
    Choices,
    ChoiceVariable,
    Floats,
    Ints,
    Problem,
    ResourceRow,
    RowTerm,
    Scope,
    Sparse,
    Term,
)
from layoutopt.solver.join_tree import JoinTree
from layoutopt.solver.resource_usage import ResourceUsage


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
