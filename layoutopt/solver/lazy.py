"""The loop around a solver: resource rows enter when they are violated, answers are believed when they
evaluate.

A program with only some of the rows is a relaxation: its proven bound holds, and an optimum of it that
evaluates as feasible is an optimum of all. A choice vector that a solver accepts by its rounding, but that
overfills a row that is already there, is excluded by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from layoutopt.runtime.clock import Clock
from layoutopt.solver.answer import TOLERANCE, AnswerCheck, Status, evaluate, relative_gap
from layoutopt.solver.backends.base import Raw, Solver, SolverRequest
from layoutopt.solver.form import Choices, Problem, ResourceRow
from layoutopt.solver.linear import Constraint, LinearProgram, linearise

EAGER = 64
"""Up to this many rows are in the program from the start."""
PER_ROUND = 12
"""Rows that are added at once."""


@dataclass
class LazySearch:
    """The search on one problem: rows in the program, the best answer, the proven bound."""

    problem: Problem
    solver: Solver
    clock: Clock
    evaluate: Callable[[Choices], AnswerCheck]
    """Evaluates the reduced problem's choices in the problem as it was given."""
    on_bound: Callable[[float], None]
    upper_bound: float = math.inf
    whole: bool = False
    meanwhile: Callable[[], None] | None = None
    best: Choices | None = None
    objective: float = math.inf
    bound: float = -math.inf
    program: LinearProgram = field(init=False)
    constraints: list[Constraint] = field(init=False)
    active: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.program = linearise(self.problem)
        self.constraints = []
        if len(self.problem.rows) <= EAGER:
            for row in self.problem.rows:
                self._activate(row)
        if math.isfinite(self.upper_bound):
            columns = self.program.costs.nonzero()[0]
            limit = self.upper_bound - self.program.constant
            limit += TOLERANCE * abs(self.upper_bound) * 1e-3
            self.constraints.append(Constraint(columns, self.program.costs[columns], limit))

    def _activate(self, row: ResourceRow) -> None:
        self.active.add(row.name)
        self.constraints.append(self.program.resource(row))

    def run(self, hint: Choices | None) -> Status:
        """Solves until proven or out of time; `best`, `objective`, `bound` have the result."""
        while not self.clock.over:
            start = self.best or hint
            listeners = self._heard, self._raise_bound
            raw = self.solver(
                SolverRequest(
                    self.program, self.constraints, self.clock.left, start, *listeners, self.meanwhile
                )
            )
            self._raise_bound(raw.bound)
            if raw.choices is None:
                return self._stopped(raw)
            found = self._consider(raw.choices)
            hint = raw.choices
            if found.feasible and (raw.status is Status.OPTIMAL or self.proven):
                return Status.OPTIMAL if self.proven else Status.FEASIBLE
            if self.proven:
                return Status.OPTIMAL
            if raw.status is not Status.OPTIMAL:
                break
            self._tighten(raw.choices, found)
        return Status.FEASIBLE if self.best is not None else Status.LIMIT

    @property
    def proven(self) -> bool:
        """The gap is closed."""
        return self.best is not None and relative_gap(self.objective, self.bound) <= TOLERANCE

    def _stopped(self, raw: Raw) -> Status:
        if raw.status is not Status.INFEASIBLE:
            return Status.FEASIBLE if self.best is not None else Status.LIMIT
        if self.best is None:
            return Status.INFEASIBLE
        self.bound = self.objective
        return Status.OPTIMAL

    def _heard(self, choices: Choices, bound: float) -> None:
        self._raise_bound(bound)
        rough = evaluate(self.problem, choices)
        if rough.feasible and rough.objective < self.objective:
            self._consider(choices)

    def _raise_bound(self, bound: float) -> None:
        if math.isfinite(bound):
            if self.whole:
                bound = math.ceil(bound - max(1e-6, 1e-12 * abs(bound)))
            if bound > self.bound:
                self.bound = bound
                self.on_bound(bound)

    def _consider(self, choices: Choices) -> AnswerCheck:
        found = self.evaluate(choices)
        if found.feasible and found.objective < self.objective:
            self.best, self.objective = choices, found.objective
        return found

    def _tighten(self, choices: Choices, found: AnswerCheck) -> None:
        """Adds the most violated rows that are not in the program yet; without any, excludes the answer."""
        absent = {row.name for row in self.problem.rows} - self.active
        fresh = [
            violation
            for violation in found.violations
            if violation.row in absent or (violation.time is not None and violation.row not in self.active)
        ]
        if not fresh:
            self.constraints.append(self.program.exclusion(choices))
            return
        fresh.sort(key=lambda violation: violation.limit - violation.use)
        names = {violation.row for violation in fresh[:PER_ROUND]}
        for row in self.problem.rows:
            if row.name in names:
                self._activate(row)
        intervals = self.problem.intervals
        for violation in fresh[:PER_ROUND]:
            if violation.time is not None and intervals is not None:
                self._activate(intervals.row(violation.time))
