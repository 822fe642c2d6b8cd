"""One door to all solvers: reduce, solve lazily, lift, and evaluate on the problem as it was given.

Large problems of unary and pair costs get an answer first (`anytime`): the least use of every variable, then
local search on the reduced problem. Local search continues in parallel with HiGHS, and replaces it for the
whole limit if the reduced problem is too large for HiGHS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from layoutopt.runtime.clock import Clock
from layoutopt.solver.answer import Solution
from layoutopt.solver.form import Problem, ProblemError

if TYPE_CHECKING:
    from layoutopt.solver.backends.base import SolverProgress

GRACE = 0.3
"""Seconds after the limit for solvers that stop by themselves."""
NAMES = ("auto", "cp-sat", "highs")


def solve(
    problem: Problem,
    solver: str = "auto",
    time_limit: float | None = None,
    on_progress: SolverProgress | None = None,
    hint: Sequence[int] | None = None,
    upper_bound: float | None = None,
) -> Solution:
    """Finds the best choices of `problem`, with a proof if the status is OPTIMAL.

    Ctrl-C ends the call with the best choices found. Equal arguments give equal answers unless a
    limit ends it.

    Args:
      time_limit: seconds; the call ends at most one second later.
      on_progress: called with (best, bound) after every improvement.
      hint: choices to start from. If they are feasible, the answer is not worse.
      upper_bound: answers above it do not count; without others the status is INFEASIBLE.

    Raises:
      ProblemError: the solver is unknown, or choices do not fit the problem.

    Example:
      >>> from layoutopt.solver import ChoiceVariable, Problem, Term, solve
      >>> variables = [ChoiceVariable("batch", 2), ChoiceVariable("heads", 2)]
      >>> problem = Problem("two", variables, [Term((0, 1), [[3.0, 2.0], [1.0, 4.0]], "time")])
      >>> answer = solve(problem)
      >>> answer.objective, tuple(answer.choices)
      (1.0, (1, 0))
    """
    if solver not in NAMES:
        raise ProblemError(f"unknown solver {solver!r}; choose one of {', '.join(NAMES)}")
    if time_limit is not None and not time_limit > 0:
        raise ProblemError(f"the time limit is {time_limit} seconds; give a positive number")
    from layoutopt.solver.incumbent import Incumbent
    from layoutopt.solver.run import SolverRun

    clock = Clock(time_limit)
    limit = math.inf if upper_bound is None else upper_bound
    incumbent = Incumbent(problem, on_progress, limit)
    run = SolverRun(incumbent, clock)
    stopped = False
    try:
        clock.within(GRACE, lambda: run.all(solver, hint))
    except KeyboardInterrupt:
        stopped = True
        with suppress(KeyboardInterrupt):
            run.report()
    return run.solution(stopped)
