"""Min-marginals: the cost of the best choices that have one given choice, or a row of a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layoutopt.solver.elimination import Elimination
from layoutopt.solver.form import Floats, ProblemError
from layoutopt.solver.relations import Relation


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
        raise ProblemError(
            "the cost tables of the problem are too large to compute the least total cost of each choice"
        )
    constant = known.bound - known.costs.least if np.isfinite(known.bound) else 0.0
    return [costs + constant for costs in known.costs.marginals()]
