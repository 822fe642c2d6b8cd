"""What the best choices cost that have one given choice: min-marginals, by one pass back over an elimination.

The bucket of step k knows what each of its assignments costs above the best for the rest of its scope
(`_Step.regret`). Its rest lies in the scope of the bucket into which its table went; with what the best whole
choices with that rest cost, they give what the best whole choices with the assignment cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layoutopt.problem.elimination import Elimination
from layoutopt.problem.form import Floats, ProblemError


def marginals(known: Elimination, sizes: Sequence[int]) -> list[Floats]:
    """For every variable, (choices,) what the best choices with each of its choices cost, by an exact
    elimination; rows are left out. ProblemError if it is not exact."""
    if not known.exact:
        raise ProblemError("the problem's tables are too large for what each choice costs")
    place = {step.variable: k for k, step in enumerate(known.steps)}
    totals: list[Floats] = [np.zeros(0)] * len(known.steps)
    found: list[Floats] = [np.zeros(size) for size in sizes]
    for k in range(len(known.steps) - 1, -1, -1):
        step = known.steps[k]
        rest = [v for v in step.scope if v != step.variable]
        above: Floats | float = known.bound
        if rest:
            into = min(place[v] for v in rest)
            others = tuple(i for i, v in enumerate(known.steps[into].scope) if v not in rest)
            above = np.expand_dims(totals[into].min(axis=others), step.scope.index(step.variable))
        totals[k] = above + step.regret
        beside = tuple(i for i, v in enumerate(step.scope) if v != step.variable)
        found[step.variable] = totals[k].min(axis=beside)
    return found
