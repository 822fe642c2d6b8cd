"""Answers: the claim of a solver (`Solution`) and its check by the problem (`evaluate`).

`evaluate` shares no code with the solvers or the reductions, so that it can contradict them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from layoutopt.solver.form import Choices, Problem, ProblemError


class Status(enum.Enum):
    """The state of knowledge when a solver stops."""

    OPTIMAL = "OPTIMAL"  # the choices are proven best within `TOLERANCE`
    FEASIBLE = "FEASIBLE"  # there are choices; something better may exist above `bound`
    INFEASIBLE = "INFEASIBLE"  # proven: no choices satisfy the problem (or its upper bound)
    LIMIT = "LIMIT"  # stopped with neither choices nor a proof


TOLERANCE = 1e-6
"""Relative gap under which an answer is called optimal."""


@dataclass(frozen=True)
class Solution:
    """The result of `solve`. `objective` is recomputed by `evaluate`; `bound` is a proven lower bound;
    `stopped`: Ctrl-C ended it."""

    status: Status
    choices: Choices | None
    objective: float
    bound: float
    wall_seconds: float
    solver: str
    stopped: bool = False

    def __post_init__(self) -> None:
        if (self.choices is None) != (self.status in (Status.INFEASIBLE, Status.LIMIT)):
            raise ProblemError(
                f"a solution with status {self.status.value} has choices={self.choices}; give choices "
                "exactly when a solution was found"
            )

    @property
    def gap(self) -> float:
        """(objective - bound) / |objective|: 0 is proven exact, inf is nothing known."""
        return relative_gap(self.objective, self.bound)


def relative_gap(objective: float, bound: float) -> float:
    """(objective - bound) / |objective|, at least 0; inf where one of them is unknown."""
    if not (math.isfinite(objective) and math.isfinite(bound)):
        return math.inf
    if bound >= objective:
        return 0.0
    return (objective - bound) / abs(objective) if objective else math.inf


@dataclass(frozen=True)
class Violation:
    """A row that some choices overfill; `time` is set where it is a point of the interval resource."""

    row: str
    use: float
    limit: float
    time: int | None = None


@dataclass(frozen=True)
class AnswerCheck:
    """The true cost of choices (inf if forbidden), which terms forbid them, which rows they overfill."""

    objective: float
    forbidden: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def feasible(self) -> bool:
        """Nothing forbidden, nothing overfilled."""
        return not self.forbidden and not self.violations


def cost(problem: Problem, choices: Sequence[int]) -> float:
    """The objective of `choices`, exactly rounded (inf if forbidden), whatever rows they overfill."""
    return math.fsum([problem.constant, *(term.cost(choices) for term in problem.terms)])


def evaluate(problem: Problem, choices: Sequence[int]) -> AnswerCheck:
    """Recomputes (1)-(4) of `form` for `choices`, exactly rounded, from the problem's own tables."""
    if len(choices) != len(problem.variables):
        raise ProblemError(
            f"{len(choices)} choices were given for problem {problem.name!r}, which has "
            f"{len(problem.variables)} variables; give one choice per variable"
        )
    for variable, choice in zip(problem.variables, choices, strict=True):
        if not 0 <= choice < variable.size:
            raise ProblemError(
                f"choice {choice} is out of range for variable {variable.name!r}, which has "
                f"{variable.size} choices (0 to {variable.size - 1})"
            )
    costs = [term.cost(choices) for term in problem.terms]
    forbidden = tuple(term.name for term, cost in zip(problem.terms, costs, strict=True) if cost == math.inf)
    objective = math.inf if forbidden else math.fsum([problem.constant, *costs])
    violations = []
    for row in problem.rows:
        use = row.use(choices)
        if use > row.limit:
            violations.append(Violation(row.name, use, row.limit))
    if problem.intervals:
        uses = problem.intervals.profile(choices)
        for point in (uses > problem.intervals.limit).nonzero()[0].tolist():
            time = problem.intervals.points[point]
            name = f"{problem.intervals.name}@{time}"
            violations.append(Violation(name, float(uses[point]), problem.intervals.limit, time))
    return AnswerCheck(objective, forbidden, tuple(violations))
