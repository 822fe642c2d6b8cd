"""The best choices of a problem so far, each checked by `evaluate`."""

from __future__ import annotations

import math

from layoutopt.solver.answer import AnswerCheck, evaluate
from layoutopt.solver.backends.base import SolverProgress
from layoutopt.solver.form import Choices, Problem

ALIKE = 1e-9
"""Relative difference below which an objective is no better than another, nor over a limit."""


class Incumbent:
    """The best answer and bound of a problem as it was given.

    Attributes:
      limit: only answers of at most this objective count.
    """

    def __init__(self, problem: Problem, on_progress: SolverProgress | None, limit: float) -> None:
        self.problem = problem
        self.on_progress = on_progress
        self.limit = limit
        self._best: tuple[Choices | None, float] = None, math.inf
        self.bound = -math.inf

    @property
    def choices(self) -> Choices | None:
        """The best so far."""
        return self._best[0]

    @property
    def objective(self) -> float:
        """The objective of the best so far; inf where there is none."""
        return self._best[1]

    def evaluate(self, choices: Choices, equal: bool = False) -> AnswerCheck:
        """Evaluates `choices`, and keeps them if they are feasible and better, or on request equally good."""
        found = evaluate(self.problem, choices)
        allowed = found.objective <= self.limit + ALIKE * abs(self.limit)
        better = found.objective < self.objective or (equal and found.objective == self.objective)
        if found.feasible and allowed and better:
            self._best = choices, found.objective  # at once, whatever may end this thread
            self._tell()
        return found

    def raise_bound(self, bound: float) -> None:
        """Notes a better proven bound."""
        if bound > self.bound:
            self.bound = bound
            self._tell()

    def _tell(self) -> None:
        if self.on_progress:
            self.on_progress(self.objective, min(self.bound, self.objective))
