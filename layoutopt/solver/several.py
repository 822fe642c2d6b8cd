"""More than one answer: the K best, and the exact frontier between the objective and a resource."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from layoutopt.runtime.clock import Clock
from layoutopt.solver.answer import Solution, Status
from layoutopt.solver.form import Choices, Problem, ProblemError, ResourceRow, Sparse
from layoutopt.solver.solve import solve


def top_k(
    problem: Problem, count: int, solver: str = "auto", time_limit: float | None = None, **options: Any
) -> tuple[Solution, ...]:
    """The `count` best distinct choice vectors, best first (fewer if there are fewer, or if the time runs
    out).

    Each is found with the earlier ones excluded. An answer after a LIMIT is not known to be the next best, so
    the list ends there. Raises `ProblemError` for a count below 1.
    """
    if count < 1:
        raise ProblemError(f"the number of answers is {count}; give at least 1")
    clock = Clock(time_limit)
    found: list[Solution] = []
    seen: list[Choices] = []
    while len(found) < count and not clock.over:
        answer = solve(problem, solver, clock.left, excluded=seen, **options)
        if answer.choices is None:
            break
        found.append(answer)
        seen.append(answer.choices)
        if answer.status is not Status.OPTIMAL:
            break
    return tuple(found)


@dataclass(frozen=True)
class FrontierPoint:
    """One point of the frontier: no choices are better in both objective and (largest) use of the rows."""

    use: float
    solution: Solution


@dataclass(frozen=True)
class Frontier:
    """The points, cheapest objective first; `complete` is True if there are no others."""

    points: tuple[FrontierPoint, ...]
    complete: bool


def pareto(
    problem: Problem,
    rows: str | Sequence[str],
    solver: str = "auto",
    time_limit: float | None = None,
    most: int = 1000,
    **options: Any,
) -> Frontier:
    """The exact frontier of (objective, use), cheapest objective first; use is the largest over `rows`
    (names).

    Epsilon constraint: solve, lower the rows' limits to just below the use that was found, solve again until
    nothing is left. Points with the objective of the next one are dropped. Only proven points are returned:
    if the time runs out, or after `most` points, the list is the frontier's beginning. Raises `ProblemError`
    for an unknown row.
    """
    names = [rows] if isinstance(rows, str) else list(rows)
    chosen = [_row(problem, name) for name in names]
    step = 1.0 if all(_whole(row) for row in chosen) else 0.0
    clock = Clock(time_limit)
    points: list[FrontierPoint] = []
    limit = math.inf
    while len(points) < most and not clock.over:
        answer = solve(_limited(problem, set(names), limit), solver, clock.left, **options)
        if answer.choices is None or answer.status is not Status.OPTIMAL:
            return Frontier(tuple(points), answer.status is Status.INFEASIBLE)
        use = max(row.use(answer.choices) for row in chosen)
        if points and answer.objective <= points[-1].solution.objective:
            points.pop()
        points.append(FrontierPoint(use, answer))
        limit = use - step if step else math.nextafter(use, -math.inf)
    return Frontier(tuple(points), False)


def _row(problem: Problem, name: str) -> ResourceRow:
    for row in problem.rows:
        if row.name == name:
            return row
    known = ", ".join(row.name for row in problem.rows) or "none"
    raise ProblemError(f"problem {problem.name!r} has no row {name!r}; known rows: {known}")


def _whole(row: ResourceRow) -> bool:
    tables = [entry.table.values if isinstance(entry.table, Sparse) else entry.table for entry in row.entries]
    return all((table == np.floor(table)).all() for table in tables)


def _limited(problem: Problem, names: set[str], limit: float) -> Problem:
    rows = tuple(
        replace(row, limit=min(row.limit, limit)) if row.name in names else row for row in problem.rows
    )
    return replace(problem, rows=rows)
