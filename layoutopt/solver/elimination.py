"""Bounds and all good choices without any solver: variables are eliminated one after the other (Bertelè and
Brioschi 1972).

    min_x sum_t T_t(x) = min over all but v of ( sum of terms without v + min_v J_v )
    J_v = sum of terms with v

Each step replaces the terms with v by one table without it, m_v = min_v J_v. Read backwards, every choice of
v has a regret J_v - m_v >= 0 above the best remaining one, and the regrets of an assignment add up to its
cost above the optimum. All assignments below a bound are therefore found directly (`below`). J_v contains
only assignments that all its terms allow (`join_tree`).

Where J_v would have too many assignments its terms are minimised in groups (mini-buckets, Dechter and Rish
2003), min_v (A + B) >= min_v A + min_v B: then the bound is lower than the optimum, and nothing is
enumerated.

Rows are left out: a bound on the problem without its limits holds with them too.

Min-marginals: the cost of the best choices that have one given choice, or a row of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.enumeration import within
from layoutopt.solver.form import Choices, Floats, Ints, Problem, ProblemError, Sparse, Term
from layoutopt.solver.join_tree import Costs, JoinTree, Relation, TablesByScope, every, grow, match, spread


def chosen(tree: JoinTree, rows: Sequence[int], count: int) -> Choices:
    """The choices of all variables in one row per bucket of an exact tree."""
    found = [0] * count
    for bucket, row in zip(tree.buckets, rows, strict=True):
        found[bucket.variable] = int(bucket.choices[row])
    return tuple(found)


def positions(tree: JoinTree, rows: Sequence[int]) -> Ints:
    """(relations,) the row of every relation in one row per bucket."""
    found = np.zeros(len(tree.relations), np.int64)
    for bucket, row in zip(tree.buckets, rows, strict=True):
        for number, index in bucket.parts:
            if number < len(found):
                found[number] = index[row]
    return found


def marginals(known: Elimination, sizes: Sequence[int]) -> list[Floats]:
    """For every variable, (choices,) the cost of the best choices with each of its choices, by exact
    elimination (inf: none); rows are left out. ProblemError if it is not exact."""
    found = [np.full(size, np.inf) for size in sizes]
    for bucket, costs in zip(known.costs.tree.buckets, _of_rows(known), strict=True):
        np.minimum.at(found[bucket.variable], bucket.choices, costs)
    return found


def rows_below(known: Elimination, most: float) -> tuple[Relation, ...]:
    """The rows, of every table over several variables, that are in some choices that cost at most `most`; as
    `marginals`."""
    costs, tree = _of_rows(known), known.costs.tree
    found = []
    for number, relation in enumerate(tree.relations):
        bucket, rows = tree.homes[number]
        if len(relation.scope) > 1:
            kept = np.unique(rows[costs[bucket] <= most])
            found.append(Relation(relation.scope, relation.cells[kept]))
    return tuple(found)


def _of_rows(known: Elimination) -> list[Floats]:
    """Per bucket, (rows,) what the best choices with each row cost."""
    if not known.exact:
        raise ProblemError("the cost tables are too large to compute the least total cost of each choice")
    constant = known.bound - known.costs.least if np.isfinite(known.bound) else 0.0
    return [costs + constant for costs in known.costs.marginals()]


CELLS = 1 << 21
"""Most assignments of one table."""


@dataclass(frozen=True, eq=False)
class Elimination:
    """The result of eliminating a problem without its rows.

    Attributes:
      bound: no choices cost less.
      exact: some choices cost just that.
      costs: of the tables, without the constant.
    """

    bound: float
    exact: bool
    costs: Costs

    def best(self) -> Choices | None:
        """Choices that cost the bound, the first of equals; None if there are none or it is not exact."""
        if not self.exact or math.isinf(self.bound):
            return None
        return chosen(self.costs.tree, self.costs.best(), len(self.costs.tree.buckets))

    def below(self, upper: float) -> Iterator[Choices]:
        """All choices that cost less than `upper`, none twice; ProblemError unless `exact`."""
        if not self.exact:
            raise ProblemError("the cost tables are too large to enumerate all assignments below a bound")
        tree, most = self.costs.tree, math.nextafter(upper - self.bound + self.costs.least, -math.inf)
        if self.bound < upper:
            listed = within(tree, [self.costs], lambda: np.array([most]), math.inf, lambda: False, every=True)
            for batch, _ in listed:
                assert batch is not None
                yield from (chosen(tree, rows, len(tree.buckets)) for rows in batch.tolist())


def eliminate(problem: Problem, cells: int = CELLS) -> Elimination:
    """Eliminates all variables, the one with the smallest table first."""
    tables = tabled(problem)
    tree = grow([relation for relation, _ in tables.values()], problem.sizes, cells)
    costs = spread(tree, [values for _, values in tables.values()])
    return Elimination(math.fsum([constant(problem), costs.least]), tree.exact, costs)


def constant(problem: Problem) -> float:
    """The cost that all choices share; inf if the problem forbids all."""
    return math.fsum([problem.constant, *(term.cost(()) for term in problem.terms if not term.scope)])


def tabled(problem: Problem) -> TablesByScope:
    """For every scope the assignments that its terms allow together, with their costs; every variable is in
    one."""
    found: TablesByScope = {}
    for term in problem.terms:
        if not term.scope:
            continue
        relation, values = _listed(term)
        if relation.scope in found:
            known, costs = found[relation.scope]
            mine, others = match(known, relation).pairs
            relation, values = Relation(known.scope, known.cells[mine]), costs[mine] + values[others]
        found[relation.scope] = relation, values
    named = {v for scope in found for v in scope}
    for v, size in enumerate(problem.sizes):
        if v not in named:
            found[(v,)] = every((v,), problem.sizes), np.zeros(size)
    return found


def _listed(term: Term) -> tuple[Relation, Floats]:
    """What a term allows, and what that costs."""
    order, scope = np.argsort(term.scope), tuple(sorted(term.scope))
    if isinstance(term.table, Sparse):
        legal = np.isfinite(term.table.values)
        return Relation(scope, term.table.assignments[legal][:, order]), term.table.values[legal]
    table = np.transpose(term.table, order)
    return Relation(scope, np.argwhere(np.isfinite(table))), table[np.isfinite(table)]
