"""Enumeration of every choice vector: slow, obviously right, for tests and for the smallest problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from layoutopt.solver.answer import Status, evaluate
from layoutopt.solver.backends.base import Raw
from layoutopt.solver.form import Choices, Problem, ProblemError

LARGEST = 2_000_000
"""The most choice vectors that are enumerated."""


def solve(
    problem: Problem,
    upper_bound: float = math.inf,
    on_better: Callable[[Choices], object] = lambda _: None,
) -> Raw:
    """The best feasible choices of at most `upper_bound` (the first of equal ones), by enumeration; each
    improvement is reported."""
    count = math.prod(problem.sizes)
    if count > LARGEST:
        raise ProblemError(
            f"problem {problem.name!r} has {count:.3g} combinations of choices, more than the {LARGEST:.3g} "
            "that the solver 'exhaustive' enumerates; use another solver"
        )
    best: Choices | None = None
    lowest = math.inf
    for choices in itertools.product(*map(range, problem.sizes)):
        found = evaluate(problem, choices)
        if found.feasible and found.objective < lowest and found.objective <= upper_bound:
            best, lowest = choices, found.objective
            on_better(choices)
    if best is None:
        return Raw(Status.INFEASIBLE, None, math.inf)
    return Raw(Status.OPTIMAL, best, lowest)
