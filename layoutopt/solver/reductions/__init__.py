"""Reductions: an equivalent smaller problem, and the inverse (the arrangement of cvxpy's `reductions`).

`reduce` applies `steps` until none changes anything. Every step keeps at least one
optimal choice vector; with `keep_all` only steps that keep every feasible one, one to one, are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layoutopt.solver.form import Choices, Problem
from layoutopt.solver.reductions import steps
from layoutopt.solver.reductions.state import ReductionState, RestoreStep, choices_of

__all__ = ["Reduced", "reduce"]


@dataclass(frozen=True, eq=False)
class Reduced:
    """The smaller problem (None: proven infeasible) and the steps between the two."""

    original: Problem
    problem: Problem | None
    left: tuple[int, ...]
    back: tuple[RestoreStep, ...]
    forth: tuple[RestoreStep, ...]

    def lift(self, choices: Sequence[int]) -> Choices:
        """The original problem's choices for the reduced problem's."""
        found = {index: choices[position] for position, index in enumerate(self.left)}
        for step in reversed(self.back):
            step(found)
        return choices_of(found, len(self.original.variables))

    def project(self, choices: Sequence[int]) -> Choices:
        """The reduced problem's choices nearest to the original's: a hint, not always feasible."""
        found = dict(enumerate(choices))
        for step in self.forth:
            step(found)
        assert self.problem is not None
        return tuple(found[index] for index in self.left) + (0,) * (
            len(self.problem.variables) - len(self.left)
        )


def reduce(problem: Problem, keep_all: bool = False) -> Reduced:
    """Shrinks `problem`; see the module."""
    state = ReductionState(problem)
    while state.dirty and not state.infeasible:
        variable = next(iter(state.dirty))
        del state.dirty[variable]
        if state.alive[variable]:
            _visit(state, variable, keep_all)
    if state.infeasible:
        return Reduced(problem, None, (), (), ())
    smaller, left = state.problem_now()
    return Reduced(problem, smaller, tuple(left), tuple(state.back), tuple(state.forth))


def _visit(state: ReductionState, variable: int, keep_all: bool) -> None:
    steps.forbidden(state, variable)
    if state.infeasible or steps.fixed(state, variable):
        return
    steps.separable(state, variable)
    if steps.functional(state, variable) or keep_all:
        return
    if not steps.dominated(state, variable):
        steps.conditional(state, variable)
