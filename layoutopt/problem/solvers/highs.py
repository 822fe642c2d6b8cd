"""HiGHS through OR-tools' MathOpt: branch and cut over the exact local polytope.

HiGHS works in floating point: its answer is rounded to choices and evaluated by the caller, its bound is lowered by its
own feasibility tolerance.
"""

from __future__ import annotations

import datetime
import math
import threading
from typing import Any

import numpy as np

from layoutopt.problem.answer import Status
from layoutopt.problem.linear import Constraint, Program
from layoutopt.problem.solvers.base import Options, Raw, Request

SLACK = 1e-9
"""HiGHS's bound is lowered by this part of the sum of the costs' sizes that it can mix up."""


def solve(request: Request) -> Raw:
    """Solves the program with HiGHS; Ctrl-C returns to the caller at once, without this call's result."""
    from ortools.math_opt.python import mathopt

    program = request.program
    unit = _unit(program)
    model = mathopt.Model.from_model_proto(_proto(request, unit))
    result: list[Any] = []

    def work() -> None:
        try:
            result.append(mathopt.solve(model, mathopt.SolverType.HIGHS, params=_parameters(mathopt, request.options)))
        except Exception as error:  # carried to the calling thread
            result.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(0.1)
    except KeyboardInterrupt:
        return Raw(Status.LIMIT, None, -math.inf, interrupted=True)
    if isinstance(result[0], Exception):
        raise result[0]
    return _read(result[0], program, unit)


def _read(result: Any, program: Program, unit: float) -> Raw:
    status = _status(result.termination.reason.name)
    dual = result.termination.objective_bounds.dual_bound
    bound = dual * unit + program.constant - SLACK * unit * program.columns if math.isfinite(dual) else -math.inf
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
        threads=options.workers,
        random_seed=options.seed,
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.0,
    )
    parameters.highs.double_options["mip_feasibility_tolerance"] = 1e-7
    return parameters


def _unit(program: Program) -> float:
    """A power of two that brings costs near 1: HiGHS's tolerances are absolute."""
    sizes = np.abs(program.costs[program.costs != 0])
    return float(2.0 ** math.floor(math.log2(float(np.median(sizes))))) if sizes.size else 1.0


def _proto(request: Request, unit: float) -> Any:
    """(1)-(6) of `linear` as MathOpt's message; joint columns are continuous."""
    from ortools.math_opt import model_pb2

    program = request.program
    proto = model_pb2.ModelProto()
    choices = int(program.offsets[-1])
    upper = np.ones(program.columns)
    upper[program.forbidden] = 0.0
    proto.variables.ids.extend(range(program.columns))
    proto.variables.lower_bounds.extend([0.0] * program.columns)
    proto.variables.upper_bounds.extend(upper.tolist())
    proto.variables.integers.extend([True] * choices + [False] * (program.columns - choices))
    used = np.flatnonzero(program.costs)
    proto.objective.linear_coefficients.ids.extend(used.tolist())
    proto.objective.linear_coefficients.values.extend((program.costs[used] / unit).tolist())
    _constraints(proto, program, request.constraints)
    return proto


def _constraints(proto: Any, program: Program, extra: Any) -> None:
    variables = len(program.offsets) - 1
    owners = np.repeat(np.arange(variables), np.diff(program.offsets))
    rows, columns = [owners], [np.arange(int(program.offsets[-1]))]
    values, lows, highs = [np.ones(len(owners))], [1.0] * variables, [1.0] * variables
    if len(program.marginals[0]):
        rows.append(program.marginals[0] + variables)
        columns.append(program.marginals[1])
        values.append(program.marginals[2].astype(np.float64))
        count = int(program.marginals[0].max()) + 1
        lows += [0.0] * count
        highs += [0.0] * count
    for constraint in extra:
        scale = _scale(constraint)
        rows.append(np.full(len(constraint.columns), len(highs)))
        columns.append(constraint.columns)
        values.append(constraint.coefficients * scale)
        highs.append(constraint.limit * scale)
        lows.append(constraint.limit * scale if constraint.equality else -math.inf)
    every, where, what = np.concatenate(rows), np.concatenate(columns), np.concatenate(values)
    order = np.lexsort((where, every))
    proto.linear_constraints.ids.extend(range(len(highs)))
    proto.linear_constraints.lower_bounds.extend(lows)
    proto.linear_constraints.upper_bounds.extend(highs)
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(every[order].tolist())
    matrix.column_ids.extend(where[order].tolist())
    matrix.coefficients.extend(what[order].tolist())


def _scale(constraint: Constraint) -> float:
    """A power of two that brings the row's largest coefficient near 1."""
    largest = float(np.abs(constraint.coefficients).max()) if len(constraint.coefficients) else 1.0
    return float(2.0 ** -math.floor(math.log2(largest)))
