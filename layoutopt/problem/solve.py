"""One door to all solvers: reduce, solve lazily, lift, and evaluate on the problem as it was given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from layoutopt.problem.answer import TOLERANCE, Evaluation, Solution, Status, evaluate, relative_gap
from layoutopt.problem.form import Choices, Floats, Problem, ProblemError, Sparse, Term
from layoutopt.problem.lazy import Search
from layoutopt.problem.reductions import Reduced, reduce
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
        reduced = reduce(problem, keep_all=bool(banned))
        name = _chosen(solver, reduced)
        if reduced.problem is None:
            return Solution(Status.INFEASIBLE, None, math.inf, math.inf, clock.elapsed, name)
        options = Options(time_limit, workers, seed)
        spare = solver == "auto" and name == "highs"
        return _search(problem, reduced, name, clock, options, on_progress, hint, limit, banned, spare)


def _chosen(solver: str, reduced: Reduced) -> str:
    """`auto`: HiGHS for large problems of pairs, whose relaxation is nearly exact; CP-SAT for the rest."""
    if solver != "auto":
        return solver
    if reduced.problem is None or any(len(term.scope) > 2 for term in reduced.problem.terms):
        return "cp-sat"
    return "highs" if sum(_values(term).size for term in reduced.problem.terms) > MANY_CELLS else "cp-sat"


def _search(
    problem: Problem,
    reduced: Reduced,
    name: str,
    clock: Clock,
    options: Options,
    on_progress: Progress | None,
    hint: Sequence[int] | None,
    limit: float,
    banned: list[Choices],
    spare: bool,
) -> Solution:
    assert reduced.problem is not None
    incumbent = _Incumbent(problem, on_progress, limit, banned)
    if hint is not None:
        incumbent.judge(tuple(hint))
    search = Search(
        reduced.problem,
        SOLVERS[name],
        options,
        clock,
        lambda choices: incumbent.judge(reduced.lift(choices)),
        incumbent.raise_bound,
        limit,
        [reduced.project(choices) for choices in banned],
        whole(problem),
    )
    start = reduced.project(hint) if hint is not None else None
    if spare:
        status, name = _with_spare(search, start, clock)
    else:
        status = search.run(start)
    if incumbent.choices is None:
        bound = math.inf if status is Status.INFEASIBLE else search.bound
        return Solution(status, None, math.inf, bound, clock.elapsed, name)
    proven = status in (Status.OPTIMAL, Status.INFEASIBLE)
    bound = min(
        max(search.bound, incumbent.objective if status is Status.INFEASIBLE else -math.inf),
        incumbent.objective,
    )
    optimal = proven and relative_gap(incumbent.objective, bound) <= TOLERANCE
    status = Status.OPTIMAL if optimal else Status.FEASIBLE
    return Solution(status, incumbent.choices, incumbent.objective, bound, clock.elapsed, name)


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


class _Incumbent:
    """The best choices of the original problem so far, each checked by `evaluate`."""

    def __init__(
        self,
        problem: Problem,
        on_progress: Progress | None,
        limit: float,
        banned: list[Choices],
    ) -> None:
        self.problem = problem
        self.on_progress = on_progress
        self.limit = limit
        self.banned = set(banned)
        self.choices: Choices | None = None
        self.objective = math.inf
        self.bound = -math.inf

    def judge(self, choices: Choices) -> Evaluation:
        """Evaluates `choices`, and keeps them if they are feasible and better."""
        found = evaluate(self.problem, choices)
        allowed = found.objective <= self.limit + 1e-9 * abs(self.limit) and choices not in self.banned
        if found.feasible and allowed and found.objective < self.objective:
            self.choices, self.objective = choices, found.objective
            self._tell()
        return found

    def raise_bound(self, bound: float) -> None:
        """Notes a better proven bound."""
        self.bound = bound
        self._tell()

    def _tell(self) -> None:
        if self.on_progress:
            self.on_progress(self.objective, min(self.bound, self.objective))


def whole(problem: Problem) -> bool:
    """Every cost is a whole number, so that the optimum is one too."""
    if problem.constant != math.floor(problem.constant):
        return False
    for term in problem.terms:
        values = _values(term)
        if not (values == np.floor(values)).all():
            return False
    return True


def _values(term: Term) -> Floats:
    return term.table.values if isinstance(term.table, Sparse) else term.table


def _exhaustive(problem: Problem, clock: Clock, limit: float, banned: list[Choices]) -> Solution:
    raw = exhaustive.solve(problem, limit, frozenset(banned))
    if raw.choices is None:
        return Solution(raw.status, None, math.inf, math.inf, clock.elapsed, "exhaustive")
    return Solution(raw.status, raw.choices, raw.bound, raw.bound, clock.elapsed, "exhaustive")
