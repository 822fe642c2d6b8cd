"""HiGHS through OR-tools' MathOpt: branch and cut over the exact local polytope.

HiGHS works in floating point: its answer is rounded to choices and evaluated by the caller, its bound is
lowered by its own feasibility tolerance. It runs on one thread: MathOpt offers no other way in this release.
"""

from __future__ import annotations

import datetime
import itertools
import math
from typing import Any

import numpy as np

from layoutopt.problem.answer import Status
from layoutopt.problem.linear import Constraint, Program
from layoutopt.problem.solvers.base import Options, Raw, Request, interruptible

DUAL_TOLERANCE = 1e-10
"""HiGHS accepts reduced costs down to minus this. A solution has one column per group at 1, so what the
proven bound can be too high by is at most this times the number of groups (weak duality: c x >= y b + sum
of reduced costs * x).
"""


def solve(request: Request) -> Raw:
    """Solves the program with HiGHS; Ctrl-C returns to the caller at once, without this call's result."""
    from ortools.math_opt.python import mathopt

    program = request.program
    unit = _unit(program)
    model = _model(mathopt, request, unit)
    parameters = _parameters(mathopt, request.options)
    try:
        result = interruptible(
            lambda: mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters),
            request.stopped,
            _leave,
        )
    except _LeftError:
        return Raw(Status.LIMIT, None, -math.inf)
    return _read(result, program, unit)


class _LeftError(Exception):
    pass


def _leave() -> None:
    """MathOpt cannot stop HiGHS from Python in this release: its thread is left behind."""
    raise _LeftError


def _read(result: Any, program: Program, unit: float) -> Raw:
    status = _status(result.termination.reason.name)
    dual = result.termination.objective_bounds.dual_bound
    bound = dual * unit + program.constant - _doubt(program, unit) if math.isfinite(dual) else -math.inf
    if status is Status.INFEASIBLE:
        return Raw(status, None, math.inf)
    if status is Status.LIMIT or not result.has_primal_feasible_solution():
        return Raw(Status.LIMIT, None, bound)
    values = result.solutions[0].primal_solution.variable_values
    ordered = np.zeros(program.columns)
    for variable, value in values.items():
        ordered[variable.id] = value
    return Raw(status, program.choices(ordered), bound)


def _status(name: str) -> Status:
    """MathOpt's termination reasons as ours."""
    known = {
        "OPTIMAL": Status.OPTIMAL,
        "FEASIBLE": Status.FEASIBLE,
        "INFEASIBLE": Status.INFEASIBLE,
        "INFEASIBLE_OR_UNBOUNDED": Status.INFEASIBLE,  # every column is 0 or 1: it cannot be unbounded
        "NO_SOLUTION_FOUND": Status.LIMIT,
        "IMPRECISE": Status.LIMIT,
    }
    if name not in known:
        raise RuntimeError(f"HiGHS stopped with {name}: the program that layoutopt wrote is not valid for it")
    return known[name]


def _parameters(mathopt: Any, options: Options) -> Any:
    limit = options.time_limit
    parameters = mathopt.SolveParameters(
        time_limit=None if limit is None else datetime.timedelta(seconds=max(limit, 0.01)),
        random_seed=options.seed,
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.0,
    )
    parameters.highs.double_options["mip_feasibility_tolerance"] = 1e-8
    parameters.highs.double_options["primal_feasibility_tolerance"] = 1e-9
    parameters.highs.double_options["dual_feasibility_tolerance"] = DUAL_TOLERANCE
    return parameters


def _doubt(program: Program, unit: float) -> float:
    return DUAL_TOLERANCE * unit * (len(program.offsets) - 1 + len(program.joints))


def _unit(program: Program) -> float:
    """A power of two that brings costs near 1: HiGHS's tolerances are absolute."""
    sizes = np.abs(program.costs[program.costs != 0])
    return float(2.0 ** math.floor(math.log2(float(np.median(sizes))))) if sizes.size else 1.0


def _model(mathopt: Any, request: Request, unit: float) -> Any:
    """(1)-(6) of `linear` as a MathOpt model; joint columns are continuous."""
    program = request.program
    model = mathopt.Model()
    upper = np.ones(program.columns)
    upper[program.forbidden] = 0.0
    choices = int(program.offsets[-1])
    columns = [
        model.add_variable(lb=0.0, ub=ub, is_integer=number < choices)
        for number, ub in enumerate(upper.tolist())
    ]
    model.minimize_linear_objective(
        mathopt.LinearSum(columns[i] * cost for i, cost in enumerate((program.costs / unit).tolist()) if cost)
    )
    starts = program.offsets.tolist()
    for start, end in itertools.pairwise(starts):
        row = model.add_linear_constraint(lb=1.0, ub=1.0)
        for column in columns[start:end]:
            row.set_coefficient(column, 1.0)
    _add_marginals(model, program, columns)
    for constraint in request.constraints:
        scale = _scale(constraint)
        limit = constraint.limit * scale
        row = model.add_linear_constraint(lb=limit if constraint.equality else -math.inf, ub=limit)
        for number, value in zip(constraint.columns.tolist(), constraint.coefficients.tolist(), strict=True):
            row.set_coefficient(columns[number], value * scale)
    return model


def _add_marginals(model: Any, program: Program, columns: list[Any]) -> None:
    rows, cells, signs = (part.tolist() for part in program.marginals)
    made: dict[int, Any] = {}
    for number, cell, sign in zip(rows, cells, signs, strict=True):
        if number not in made:
            made[number] = model.add_linear_constraint(lb=0.0, ub=0.0)
        made[number].set_coefficient(columns[cell], float(sign))


def _scale(constraint: Constraint) -> float:
    """A power of two that brings the row's largest coefficient near 1."""
    largest = float(np.abs(constraint.coefficients).max()) if len(constraint.coefficients) else 1.0
    return float(2.0 ** -math.floor(math.log2(largest)))
