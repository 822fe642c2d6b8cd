"""The process in which HiGHS runs."""

from __future__ import annotations

import datetime
import time
from typing import Any, NamedTuple

import numpy as np

from layoutopt.runtime.own_process import first_letter
from layoutopt.solver.form import Floats, Ints

PAUSE = 0.005
"""Seconds between two looks for a task."""


class LinearRow(NamedTuple):
    """low <= sum of coefficients * columns <= high."""

    columns: Ints
    coefficients: Floats
    low: float
    high: float


class Task(NamedTuple):
    """Minimise costs * x with 0 <= x <= upper, the first `whole` columns being integers."""

    costs: Floats
    upper: Floats
    whole: int
    lines: tuple[LinearRow, ...]
    time_limit: float | None
    dual_tolerance: float


class HighsAnswer(NamedTuple):
    """MathOpt's reason to stop, its dual bound, and the columns' values if it has a solution."""

    reason: str
    dual_bound: float
    values: Floats | None


def main() -> None:
    """Answers tasks one by one; an error is an answer too."""
    task, heard, send = first_letter()
    while True:
        try:
            send(solve(task))
        except Exception as error:  # carried to the parent
            send(error)
        while not heard:
            time.sleep(PAUSE)
        task = heard.popleft()


def solve(task: Task) -> HighsAnswer:
    """One task through MathOpt."""
    from ortools.math_opt.python import mathopt

    result = mathopt.solve(_model(mathopt, task), mathopt.SolverType.HIGHS, params=_parameters(mathopt, task))
    values = None
    if result.has_primal_feasible_solution():
        values = np.zeros(len(task.costs))
        for variable, value in result.solutions[0].primal_solution.variable_values.items():
            values[variable.id] = value
    termination = result.termination
    return HighsAnswer(termination.reason.name, float(termination.objective_bounds.dual_bound), values)


def _model(mathopt: Any, task: Task) -> Any:
    model = mathopt.Model()
    columns = [
        model.add_variable(lb=0.0, ub=ub, is_integer=number < task.whole)
        for number, ub in enumerate(task.upper.tolist())
    ]
    model.minimize_linear_objective(
        mathopt.LinearSum(columns[i] * cost for i, cost in enumerate(task.costs.tolist()) if cost)
    )
    for line in task.lines:
        row = model.add_linear_constraint(lb=line.low, ub=line.high)
        for number, value in zip(line.columns.tolist(), line.coefficients.tolist(), strict=True):
            row.set_coefficient(columns[number], value)
    return model


def _parameters(mathopt: Any, task: Task) -> Any:
    limit = task.time_limit
    parameters = mathopt.SolveParameters(
        time_limit=None if limit is None else datetime.timedelta(seconds=max(limit, 0.01)),
        random_seed=0,
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.0,
    )
    parameters.highs.double_options["mip_feasibility_tolerance"] = 1e-8
    parameters.highs.double_options["primal_feasibility_tolerance"] = 1e-9
    parameters.highs.double_options["dual_feasibility_tolerance"] = task.dual_tolerance
    return parameters
