"""What the best choices cost that have one given choice: min-marginals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layoutopt.problem.elimination import Elimination
from layoutopt.problem.form import Floats, ProblemError


def marginals(known: Elimination, sizes: Sequence[int]) -> list[Floats]:
    """For every variable, (choices,) what the best choices with each of its choices cost, by an exact
    elimination (inf: none); rows are left out. ProblemError if it is not exact."""
    if not known.exact:
        raise ProblemError("the problem's tables are too large for what each choice costs")
    constant = known.bound - known.costs.least if np.isfinite(known.bound) else 0.0
    found = [np.full(size, np.inf) for size in sizes]
    for bucket, costs in zip(known.costs.tree.buckets, known.costs.marginals(), strict=True):
        np.minimum.at(found[bucket.variable], bucket.choices, costs + constant)
    return found
