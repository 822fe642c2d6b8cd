"""One call of `solve`: reduce, solve lazily, lift, and evaluate on the original problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from layoutopt.runtime.clock import Clock
from layoutopt.solver.answer import TOLERANCE, Solution, Status, relative_gap
from layoutopt.solver.backends import cp_sat, highs
from layoutopt.solver.backends.base import Solver
from layoutopt.solver.form import Choices, Problem
from layoutopt.solver.incumbent import Incumbent
from layoutopt.solver.lagrangian import price, whole
from layoutopt.solver.lazy import LazySearch
from layoutopt.solver.reductions import reduce
from layoutopt.solver.residual import ResidualProblem

if TYPE_CHECKING:
    from layoutopt.solver.anytime.improve import Improver

SOLVERS: dict[str, Solver] = {"cp-sat": cp_sat.solve, "highs": highs.solve}
MANY_CELLS, MOST_CELLS = 5000, 300_000
"""Values of all terms from which HiGHS is tried, and up to which it is where there is a time limit."""
SPARE_FROM = 0.75


class _Way(Protocol):
    """A smaller problem's choices, and those of the problem that it was made from."""

    def lift(self, choices: Sequence[int]) -> Choices:
        """The other problem's choices."""

    def project(self, choices: Sequence[int]) -> Choices:
        """The smaller problem's that are nearest."""


def _lifted(ways: Sequence[_Way], choices: Choices) -> Choices:
    for way in reversed(ways):
        choices = way.lift(choices)
    return choices


def _projected(ways: Sequence[_Way], choices: Choices) -> Choices:
    for way in ways:
        choices = way.project(choices)
    return choices


@dataclass
class SolverRun:
    """One call of `solve`.

    Attributes:
      above: solvers look only for answers below this.
      name: the solver that runs, or that solved it.
      proven: nothing better than the incumbent is left.
    """

    incumbent: Incumbent
    clock: Clock
    above: float = math.inf
    name: str = "elimination"
    proven: bool = False
    improver: Improver | None = None

    def solution(self, stopped: bool) -> Solution:
        """The best answer and bound at the end of the run."""
        known, elapsed = self.incumbent, self.clock.elapsed
        choices, best = known.choices, known.objective
        if choices is None:
            status, bound = (Status.INFEASIBLE, math.inf) if self.proven else (Status.LIMIT, known.bound)
            return Solution(status, None, math.inf, bound, elapsed, self.name, stopped)
        bound = min(known.bound, best)
        status = Status.OPTIMAL if relative_gap(best, bound) <= TOLERANCE else Status.FEASIBLE
        return Solution(status, choices, best, bound, elapsed, self.name, stopped)

    def report(self) -> None:
        """Evaluates the results of local search since the last call."""
        if self.improver is not None:
            self.improver.report()

    def all(self, solver: str, hint: Sequence[int] | None) -> None:
        """All of it."""
        incumbent, problem = self.incumbent, self.incumbent.problem
        if hint is not None:
            incumbent.evaluate(tuple(hint))
        self.above = incumbent.objective
        if self.clock.limit is not None:
            from layoutopt.solver.anytime.network import least_use

            incumbent.evaluate(least_use(problem))  # to have something early
            cheapest = [
                problem.constant,
                *(float(term.values.min(initial=math.inf)) for term in problem.terms),
            ]
            if all(map(math.isfinite, cheapest)):
                incumbent.raise_bound(math.nextafter(math.fsum(cheapest), -math.inf))
        left = price(incumbent, self.clock) if solver == "auto" else ResidualProblem.whole(problem)
        if left is None:
            self.proven = True
        elif solver == "auto" and _large(left.problem):
            self.large(left)
        elif solver != "auto" or not self.clock.over:
            self.rest(solver, left.problem, [left])

    def large(self, left: ResidualProblem) -> None:
        """Computes a first answer, then runs local search, in parallel with HiGHS if that can be ended."""
        from layoutopt.solver.anytime.improve import Improver
        from layoutopt.solver.anytime.network import least_use, network

        incumbent, clock = self.incumbent, self.clock
        if clock.limit is None:
            incumbent.evaluate(left.lift(least_use(left.problem)))
        if clock.over and incumbent.choices is not None:
            self.name = "least use"
            return
        gentle = reduce(left.problem, keep_all=True)
        if gentle.problem is None:
            self.proven = True
            return
        ways: list[_Way] = [left, gentle]
        known = network(gentle.problem)
        if known is None:
            self.rest("auto", gentle.problem, ways)
            return
        self.improver = Improver(incumbent, known, partial(_lifted, ways), clock)
        if clock.limit is not None and _cells(gentle.problem) > MOST_CELLS:
            self.name = "local search"
            self.improver.run()
        else:
            self.rest("auto", gentle.problem, ways)

    def rest(self, solver: str, problem: Problem, ways: list[_Way]) -> None:
        """Runs solvers on a `problem` after all `ways`."""
        incumbent, improver = self.incumbent, self.improver
        reduced = reduce(problem)
        self.name = name = _chosen(solver, reduced.problem)
        if reduced.problem is None:
            self.proven = True
            return
        ways = [*ways, reduced]
        search = LazySearch(
            reduced.problem,
            SOLVERS[name],
            self.clock,
            lambda choices: incumbent.evaluate(_lifted(ways, choices)),
            incumbent.raise_bound,
            min(incumbent.limit, self.above),
            whole(incumbent.problem),
            improver.step if improver else None,
        )
        start = _projected(ways, incumbent.choices) if incumbent.choices is not None else None
        if solver == "auto" and name == "highs":
            status, self.name = _with_spare(search, start, self.clock, improver)
        else:
            status = search.run(start)
        incumbent.raise_bound(incumbent.objective if status is Status.INFEASIBLE else search.bound)
        if improver and status in (Status.LIMIT, Status.FEASIBLE):
            improver.run()
            self.name += "+local search"
        elif search.best is not None:
            incumbent.evaluate(_lifted(ways, search.best), equal=True)
        self.proven = status in (Status.OPTIMAL, Status.INFEASIBLE)


def _chosen(solver: str, problem: Problem | None) -> str:
    """`auto`: HiGHS for large problems of pairs, whose relaxation is nearly exact; CP-SAT for the rest."""
    if solver != "auto":
        return solver
    return "highs" if problem is not None and _large(problem) else "cp-sat"


def _large(problem: Problem) -> bool:
    """Many unary and pair costs, and no others."""
    return _cells(problem) > MANY_CELLS and all(len(term.scope) <= 2 for term in problem.terms)


def _cells(problem: Problem) -> int:
    return sum(term.values.size for term in problem.terms)


def _with_spare(
    search: LazySearch, start: Choices | None, clock: Clock, improver: Improver | None
) -> tuple[Status, str]:
    """HiGHS can end with nothing usable: CP-SAT gets what is left of a time limit, its last quarter where no
    local search has an answer."""
    limit = clock.limit
    if limit is not None:
        clock.limit = limit - improver.reserve if improver else SPARE_FROM * limit
    status = search.run(start)
    clock.limit = limit
    early = limit is None or clock.elapsed < (SPARE_FROM + 0.1) * limit
    if status in (Status.LIMIT, Status.FEASIBLE) and not clock.over and early:
        search.solver, search.meanwhile = cp_sat.solve, None
        return search.run(search.best or start), "highs+cp-sat"
    return status, "highs"
