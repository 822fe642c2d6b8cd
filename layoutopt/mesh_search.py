"""The search on one mesh: solve the integer program, judge the answer, exclude what does not really fit, again.

The answer of a solver is never believed: `evaluate` lowers the whole graph under it and computes time and memory anew.
The memory rows of the integer program never forbid a layout that fits (see `extract`), so a layout that the judge finds
too large is excluded by itself, and what remains is proven best among the layouts that fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from costmodels.hardware import Hardware
from costmodels.pricing import pricer
from layoutopt.evaluate import Evaluation, evaluate
from layoutopt.extract import Extraction, extract
from layoutopt.problem import Problem, Solution, Status, solve
from mesh_tf_core.layout import Axes, Layout
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.model import Model

Listener = Callable[[float, float], None]


@dataclass(frozen=True)
class Found:
    """A layout with the judge's price and the solver's claim."""

    mesh: Mesh
    layout: Layout
    judged: Evaluation
    solution: Solution

    @property
    def seconds(self) -> float:
        return self.judged.cost.step_seconds

    @property
    def peak(self) -> int:
        return self.judged.memory.peak


@dataclass(frozen=True)
class Outcome:
    """What one question about a mesh came to.

    Attributes:
      found: the best layout (None: there is none, or none was found in time).
      bound: no layout that was asked for takes fewer seconds.
      proven: `found` is the best, or its absence is certain.
    """

    found: Found | None
    bound: float
    proven: bool


class MeshSearch:
    """One model on one mesh and one piece of hardware."""

    def __init__(
        self, model: Model, mesh: Mesh, options: Mapping[str, tuple[Axes, ...]], hardware: Hardware
    ) -> None:
        self.model, self.mesh, self.hardware = model, mesh, hardware
        self.prices = pricer(hardware, mesh)
        self.extraction: Extraction = extract(model, mesh, options, self.prices)
        self.judged: dict[tuple[int, ...], Evaluation] = {}

    def judge(self, choices: tuple[int, ...]) -> Evaluation:
        if choices not in self.judged:
            layout = self.extraction.layout(choices)
            self.judged[choices] = evaluate(self.model, self.mesh, layout, self.hardware, prices=self.prices)
        return self.judged[choices]

    def fastest(
        self,
        limit: float,
        upper: float | None = None,
        deadline: float | None = None,
        listener: Listener | None = None,
        excluded: tuple[tuple[int, ...], ...] = (),
    ) -> Outcome:
        """The fastest layout whose exact peak is at most `limit` bytes and that takes at most `upper` seconds."""
        problem = limited(self.extraction.problem, limit)
        bound = 0.0
        banned = list(excluded)
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.01)
            solution = solve(
                problem, time_limit=left, upper_bound=upper, excluded=banned, on_progress=listener
            )
            if solution.choices is None:
                proven = solution.status is Status.INFEASIBLE
                return Outcome(None, math.inf if proven else max(bound, solution.bound), proven)
            judged = self.judge(solution.choices)
            bound = max(bound, solution.bound)
            if judged.memory.peak <= limit:
                found = Found(self.mesh, self.extraction.layout(solution.choices), judged, solution)
                return Outcome(found, bound, solution.status is Status.OPTIMAL)
            banned.append(solution.choices)

    def frontier(self, limit: float, deadline: float | None = None) -> list[Outcome]:
        """Fastest layout within `limit`, then within less than that one takes, and so on: time against memory, exact."""
        out: list[Outcome] = []
        while True:
            outcome = self.fastest(limit, deadline=deadline)
            if outcome.found is None:
                return out if outcome.proven else [*out, outcome]
            out.append(outcome)
            limit = outcome.found.peak - 1

    def least_memory(self, limit: float = math.inf, deadline: float | None = None) -> Outcome:
        """The layout with the least peak; among equals the first found."""
        last = Outcome(None, 0.0, True)
        for outcome in self.frontier(limit, deadline):
            last = outcome
        return last


def limited(problem: Problem, limit: float) -> Problem:
    """The problem with another memory limit."""
    return replace(problem, rows=tuple(replace(row, limit=limit) for row in problem.rows))
