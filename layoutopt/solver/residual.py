"""The rest of a join tree as a separate problem: fewer variables, choices and assignments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.solver import form
from layoutopt.solver.join_tree import JoinTree
from layoutopt.solver.resource_usage import ResourceUsage


@dataclass(frozen=True, eq=False)
class ResidualProblem:
    """A problem over some choices of another's variables.

    Attributes:
      kept: per variable of the other, its choices that are left.
      free: the variables of the other problem that are those of `problem`; the rest have one choice.
    """

    problem: form.Problem
    kept: tuple[form.Ints, ...]
    free: tuple[int, ...]

    @staticmethod
    def whole(problem: form.Problem) -> ResidualProblem:
        """All of a problem."""
        sizes = problem.sizes
        return ResidualProblem(problem, tuple(np.arange(size) for size in sizes), tuple(range(len(sizes))))

    def lift(self, choices: Sequence[int]) -> form.Choices:
        """The other problem's choices."""
        found = [int(kept[0]) for kept in self.kept]
        for v, choice in zip(self.free, choices, strict=True):
            found[v] = int(self.kept[v][choice])
        return tuple(found)

    def project(self, choices: Sequence[int]) -> form.Choices:
        """The choices here that are nearest to the other problem's."""
        pairs = ((self.kept[v], choices[v]) for v in self.free)
        return tuple(min(int(np.searchsorted(kept, choice)), len(kept) - 1) for kept, choice in pairs)


def rest(
    problem: form.Problem,
    tree: JoinTree,
    values: Sequence[form.Floats],
    rows: Sequence[form.ResourceRow],
    used: ResourceUsage,
    constant: float,
) -> ResidualProblem:
    """The rest of `problem`: an exact `tree` of its relations with their costs, its `rows` with their
    `used`."""
    kept: list[form.Ints] = [np.zeros(0, np.int64)] * len(problem.sizes)
    for bucket in tree.buckets:
        kept[bucket.variable] = np.unique(bucket.choices)
    free = [v for v, choices in enumerate(kept) if len(choices) > 1]
    number = {v: k for k, v in enumerate(free)}
    terms: list[form.Term] = []
    entries: list[list[form.RowTerm]] = [[] for _ in rows]
    for k, relation in enumerate(tree.relations):
        left = tree.left(k)
        mine = [v for v in relation.scope if v in number]
        columns = relation.columns(mine)[left].T
        cells = [np.searchsorted(kept[v], column) for v, column in zip(mine, columns, strict=True)]
        listed = np.stack(cells, axis=1) if cells else np.zeros((1, 0), np.int64)
        scope: form.Scope = tuple(number[v] for v in mine)
        if values[k][left].any() or len(listed) < math.prod(len(kept[v]) for v in mine):
            terms.append(form.Term(scope, form.Sparse(listed, values[k][left])))
        for row, counted in enumerate(used.tables.get(k, np.zeros((0, 0)))):
            if counted[left].any():
                entries[row].append(form.RowTerm(scope, form.Sparse(listed, counted[left])))
    variables = tuple(form.ChoiceVariable(problem.variables[v].name, len(kept[v])) for v in free)
    limited = zip(rows, used.limits.tolist(), entries, strict=True)
    smaller = tuple(form.ResourceRow(row.name, limit, tuple(found)) for row, limit, found in limited)
    left_over = form.Problem(problem.name, variables, tuple(terms), smaller, constant=constant)
    return ResidualProblem(left_over, tuple(kept), tuple(free))
