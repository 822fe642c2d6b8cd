"""One door to all solvers: reduce, solve lazily, lift, and evaluate on the problem as it was given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from layoutopt.problem.answer import TOLERANCE, Solution, Status, relative_gap
from layoutopt.problem.form import Choices, Floats, Problem, ProblemError, Sparse, Term
from layoutopt.problem.incumbent import Incumbent
from layoutopt.problem.lagrangian import price, whole
from layoutopt.problem.lazy import Search
from layoutopt.problem.reductions import Reduced, reduce
from layoutopt.problem.residual import Residual
from layoutopt.problem.solvers import cp_sat, exhaustive, highs
from layoutopt.problem.solvers.base import Clock, Options, Progress, Solver, ctrl_c

SOLVERS: dict[str, Solver] = {"cp-sat": cp_sat.solve, "highs": highs.solve}
MANY_CELLS = 5000
SPARE_FROM = 0.75
NAMES = ("auto", "cp-sat", "highs", "exhaustive")


def solve(
    problem: Problem,
    solver: str = "auto",
    time_limit: float | None = None,
    on_progress: Progress | None = None,
    hint: Sequence[int] | None = None,
    upper_bound: float | None = None,
    *,
    excluded: Sequence[Sequence[int]] = (),
    workers: int = 1,
    seed: int = 0,
) -> Solution:
    """The best choices of `problem`, with a proof where the status says OPTIMAL.

    `time_limit` is in seconds. `on_progress(best, bound)` hears every improvement. `hint` is a choice vector
    to start from; if it is feasible the answer is never worse. Only answers of at most `upper_bound` count:
    without any, the status is INFEASIBLE. `excluded` are choice vectors that may not be the answer. Ctrl-C
    stops and returns the best so far. `workers` are CP-SAT's threads; with the same arguments the answer is
    the same on every run that no limit cuts. Raises `ProblemError` for an unknown solver or for choices that
    do not fit the problem.
    """
    if solver not in NAMES:
        raise ProblemError(f"there is no solver {solver!r}; choose one of: {', '.join(NAMES)}")
    if time_limit is not None and not time_limit > 0:
        raise ProblemError(f"a time limit of {time_limit} seconds leaves no time; give a positive number")
    banned = [tuple(choices) for choices in excluded]
    clock = Clock(time_limit)
    limit = math.inf if upper_bound is None else upper_bound
    if solver == "exhaustive":
        return _exhaustive(problem, clock, limit, banned)
    with ctrl_c(clock.stopped):
        incumbent = Incumbent(problem, on_progress, limit, banned)
        if hint is not None:
            incumbent.evaluate(tuple(hint))
        left = price(incumbent, clock) if solver == "auto" else Residual.whole(problem)
        if left is None or (solver == "auto" and clock.over):
            return _solution(incumbent, left is None, clock, "elimination")
        reduced = reduce(left.problem, keep_all=bool(banned))
        name = _chosen(solver, reduced)
        if reduced.problem is None:
            return _solution(incumbent, True, clock, name)
        options = Options(clock.left, workers, seed)
        return _search(incumbent, left, reduced, name, clock, options, solver == "auto" and name == "highs")


def _solution(incumbent: Incumbent, proven: bool, clock: Clock, name: str) -> Solution:
    """What is known in the end; `proven`: nothing better is left."""
    choices, best, stopped = incumbent.choices, incumbent.objective, clock.stopped.is_set()
    if choices is None:
        status, bound = (Status.INFEASIBLE, math.inf) if proven else (Status.LIMIT, incumbent.bound)
        return Solution(status, None, math.inf, bound, clock.elapsed, name, stopped)
    bound = min(incumbent.bound, best)
    optimal = proven and relative_gap(best, bound) <= TOLERANCE
    status = Status.OPTIMAL if optimal else Status.FEASIBLE
    return Solution(status, choices, best, bound, clock.elapsed, name, stopped)


def _chosen(solver: str, reduced: Reduced) -> str:
    """`auto`: HiGHS for large problems of pairs, whose relaxation is nearly exact; CP-SAT for the rest."""
    if solver != "auto":
        return solver
    if reduced.problem is None or any(len(term.scope) > 2 for term in reduced.problem.terms):
        return "cp-sat"
    return "highs" if sum(_values(term).size for term in reduced.problem.terms) > MANY_CELLS else "cp-sat"


def _search(
    incumbent: Incumbent,
    left: Residual,
    reduced: Reduced,
    name: str,
    clock: Clock,
    options: Options,
    spare: bool,
) -> Solution:
    """Solves what is left; what is missing there is no better than the incumbent."""
    assert reduced.problem is not None

    def projected(choices: Choices) -> Choices:
        return reduced.project(left.project(choices))

    search = Search(
        reduced.problem,
        SOLVERS[name],
        options,
        clock,
        lambda choices: incumbent.evaluate(left.lift(reduced.lift(choices))),
        incumbent.raise_bound,
        min(incumbent.limit, incumbent.objective),
        [projected(choices) for choices in sorted(incumbent.banned) if left.holds(choices)],
        whole(incumbent.problem),
    )
    start = projected(incumbent.choices) if incumbent.choices is not None else None
    if spare:
        status, name = _with_spare(search, start, clock)
    else:
        status = search.run(start)
    incumbent.raise_bound(incumbent.objective if status is Status.INFEASIBLE else search.bound)
    return _solution(incumbent, status in (Status.OPTIMAL, Status.INFEASIBLE), clock, name)


def _with_spare(search: Search, start: Choices | None, clock: Clock) -> tuple[Status, str]:
    """HiGHS can end with nothing usable: CP-SAT gets the last quarter of a time limit."""
    limit = clock.limit
    clock.limit = None if limit is None else SPARE_FROM * limit
    status = search.run(start)
    clock.limit = limit
    if status in (Status.LIMIT, Status.FEASIBLE) and not clock.over:
        search.solver = cp_sat.solve
        return search.run(search.best or start), "highs+cp-sat"
    return status, "highs"


def _values(term: Term) -> Floats:
    return term.table.values if isinstance(term.table, Sparse) else term.table


def _exhaustive(problem: Problem, clock: Clock, limit: float, banned: list[Choices]) -> Solution:
    raw = exhaustive.solve(problem, limit, frozenset(banned))
    if raw.choices is None:
        return Solution(raw.status, None, math.inf, math.inf, clock.elapsed, "exhaustive")
    return Solution(raw.status, raw.choices, raw.bound, raw.bound, clock.elapsed, "exhaustive")
