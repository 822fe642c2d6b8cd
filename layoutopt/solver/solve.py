"""One door to all solvers: reduce, solve lazily, lift, and evaluate on the problem as it was given.

Large problems of unary and pair costs get an answer first (`anytime`): everybody's least use, then local
search on what the reductions leave. It goes on beside HiGHS, in whose place it takes all the time of a limit
where what is left is too large for HiGHS.
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
"""Seconds after the limit in which what stops by itself may do so."""
NAMES = ("auto", "cp-sat", "highs", "exhaustive")


def solve(
    problem: Problem,
    solver: str = "auto",
    time_limit: float | None = None,
    on_progress: SolverProgress | None = None,
    hint: Sequence[int] | None = None,
    upper_bound: float | None = None,
    *,
    excluded: Sequence[Sequence[int]] = (),
    workers: int = 1,
    seed: int = 0,
) -> Solution:
    """The best choices of `problem`, with a proof where the status says OPTIMAL.

    `time_limit` is in seconds; it is kept within a second, whatever is being done. `on_progress(best, bound)`
    hears every improvement. `hint` is a choice vector to start from; if it is feasible the answer is never
    worse. Only answers of at most `upper_bound` count: without any, the status is INFEASIBLE. `excluded` are
    choice vectors that may not be the answer. Ctrl-C stops and returns the best so far. `workers` are
    CP-SAT's threads; with the same arguments the answer is the same on every run that no limit cuts. Raises
    `ProblemError` for an unknown solver or for choices that do not fit the problem.
    """
    if solver not in NAMES:
        raise ProblemError(f"there is no solver {solver!r}; choose one of: {', '.join(NAMES)}")
    if time_limit is not None and not time_limit > 0:
        raise ProblemError(f"a time limit of {time_limit} seconds leaves no time; give a positive number")
    from layoutopt.solver.backends.base import SolverOptions
    from layoutopt.solver.incumbent import Incumbent
    from layoutopt.solver.run import SolverRun

    clock = Clock(time_limit)
    limit = math.inf if upper_bound is None else upper_bound
    incumbent = Incumbent(problem, on_progress, limit, [tuple(choices) for choices in excluded])
    run = SolverRun(incumbent, clock, SolverOptions(time_limit, workers, seed))
    stopped = False
    try:
        clock.within(GRACE, lambda: run.all(solver, hint))
    except KeyboardInterrupt:
        stopped = True
        with suppress(KeyboardInterrupt):
            run.report()
    return run.solution(stopped)
