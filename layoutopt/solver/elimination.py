r"""Bounds and all good choices without any solver: variables are eliminated one after the other (Bertelè and
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
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.form import Choices, Floats, Problem, ProblemError, Sparse, Term
from layoutopt.solver.join_tree import grow
from layoutopt.solver.message_passing import Costs, chosen, spread
from layoutopt.solver.relations import Relation, TablesByScope, every, match

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
            raise ProblemError(
                "the cost tables of the problem are too large to enumerate all assignments below a bound"
            )
        tree, regrets = self.costs.tree, self.costs.regrets()
        count = len(tree.buckets)
        picked, given = [0] * count, [0] * count

        def extend(k: int, left: float) -> Iterator[Choices]:
            if k < 0:
                yield tuple(picked)
                return
            bucket = tree.buckets[k]
            begin, end = bucket.begins[given[k] : given[k] + 2].tolist()
            row = regrets[k][begin:end]
            for place in np.argsort(row, kind="stable").tolist():
                if not row[place] < left:
                    break
                picked[bucket.variable] = int(bucket.choices[begin + place])
                for source, messages in tree.sources(bucket):
                    given[source] = int(messages[begin + place])
                yield from extend(k - 1, left - float(row[place]))

        if self.bound < upper:
            yield from extend(count - 1, upper - self.bound)


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
