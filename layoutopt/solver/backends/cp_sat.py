"""CP-SAT (OR-tools): clause learning with linear relaxations, in whole numbers.

Deterministic: equal input gives equal output unless a time limit cuts the search. It counts in 64-bit
integers: costs are multiplied by a power of two and rounded, so that sums of the largest cost of every group
stay below 2^`BITS`; whole ones stay as they are. A solution picks one column per group, so a bound of the
scaled costs, minus the largest rounding error of every group (`Scaled.error`), is one of the true costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from layoutopt.solver.answer import Status
from layoutopt.solver.backends.base import Raw, SolverRequest, interruptible, read_status
from layoutopt.solver.form import Floats, Ints

BITS = 42
WHOLE_BITS = 60


@dataclass(frozen=True, eq=False)
class Scaled:
    """`whole` is about values * scale; a true cost and its whole one / scale differ by at most `error`."""

    whole: Ints
    scale: float
    error: float


def scale_costs(values: Floats, groups: Iterable[Floats]) -> Scaled:
    """Costs rounded to nearest; `groups` are views of `values` of which each solution picks one member."""
    parts = [group for group in groups if group.size]
    total = math.fsum(float(np.abs(group).max()) for group in parts)
    scale = 1.0 if _whole(values) and total < 2.0**WHOLE_BITS else _power(total, BITS)
    whole = np.rint(values * scale)
    if scale == 1.0 and _whole(values):
        return Scaled(whole.astype(np.int64), 1.0, 0.0)
    error = math.fsum(float(np.abs(np.rint(group * scale) / scale - group).max()) for group in parts)
    return Scaled(whole.astype(np.int64), scale, error)


def scale_row(coefficients: Floats, limit: float) -> tuple[Ints, int]:
    """A row rounded so that no solution is lost: coefficients down, the limit down after equal scaling.

    sum floor(s w) <= s sum w <= s limit, and the left side is whole. It may admit solutions over the true
    limit by a rounding error; the caller checks answers against the true row.
    """
    total = float(np.abs(coefficients).sum()) + 1.0
    bounded = min(max(limit, -total), total)
    if _whole(coefficients) and total < 2.0**WHOLE_BITS:
        return coefficients.astype(np.int64), math.floor(bounded)
    scale = _power(total, 50)
    return np.floor(coefficients * scale).astype(np.int64), math.floor(bounded * scale)


def _whole(values: Floats) -> bool:
    return bool((values == np.rint(values)).all())


def _power(total: float, bits: int) -> float:
    """The largest power of two that keeps `total` below 2^bits."""
    return 1.0 if total <= 0 else 2.0 ** (bits - math.frexp(total)[1])


STATUSES = {**{s.name: s for s in Status if s is not Status.LIMIT}, "UNKNOWN": Status.LIMIT}


def solve(request: SolverRequest) -> Raw:
    """Solves the program with CP-SAT."""
    from ortools.sat.python import cp_model

    program = request.program
    scaled = scale_costs(program.costs, program.groups)
    model = cp_model.CpModel()
    _fill(model.Proto(), request, scaled)
    solver = cp_model.CpSolver()
    _configure(solver.parameters, request.time_limit)
    listener = _listener(cp_model, request, scaled) if request.on_solution else None
    if request.on_bound:
        tell = request.on_bound
        solver.best_bound_callback = lambda value: tell(
            value / scaled.scale + program.constant - scaled.error
        )
    code = interruptible(lambda: solver.Solve(model, listener), solver.stop_search)
    status = read_status("CP-SAT", solver.StatusName(code), STATUSES)
    bound = solver.BestObjectiveBound() / scaled.scale + program.constant - scaled.error
    if status is Status.INFEASIBLE:
        return Raw(status, None, math.inf)
    if status is Status.LIMIT:
        return Raw(status, None, bound if math.isfinite(bound) and program.costs.any() else -math.inf)
    values = np.array(solver.ResponseProto().solution[: int(program.offsets[-1])], dtype=np.float64)
    return Raw(status, program.choices(values), bound)


def _configure(parameters: Any, time_limit: float | None) -> None:
    """One worker and one seed keep the answer the same on every run.

    Level 2 puts all of the local polytope into the linear relaxation, which is what proves. Probing costs a
    second per round and finds what `reductions` found before. Both were measured, on random problems over
    wide tables and on the contest's.
    """
    parameters.random_seed = 0
    parameters.num_workers = 1
    parameters.linearization_level = 2
    parameters.cp_model_probing_level = 0
    parameters.relative_gap_limit = 0.0
    parameters.absolute_gap_limit = 0.0
    parameters.catch_sigint_signal = False  # it only works in its own thread
    if time_limit is not None:
        parameters.max_time_in_seconds = time_limit


def _fill(proto: Any, request: SolverRequest, scaled: Scaled) -> None:
    """Writes columns, (1)-(3) of `linear`, objective and constraints into CP-SAT's message."""
    program = request.program
    bound = np.ones(program.columns, dtype=np.int64)
    bound[program.forbidden] = 0
    for upper in bound.tolist():
        proto.variables.add().domain.extend((0, upper))
    starts = program.offsets.tolist()
    for start, end in itertools.pairwise(starts):
        proto.constraints.add().exactly_one.literals.extend(range(start, end))
    for columns, signs in _split(*program.marginals):
        _linear(proto, columns, signs, 0, 0)
    for constraint in request.constraints:
        whole, limit = scale_row(constraint.coefficients, constraint.limit)
        if not math.isinf(constraint.limit) and len(whole) == 0 and limit < 0:
            proto.constraints.add().bool_or.SetInParent()  # nothing to use, yet over the limit: false
        elif not math.isinf(constraint.limit):
            columns, signs = constraint.columns.tolist(), whole.tolist()
            _linear(proto, columns, signs, limit if constraint.equality else -(2**62), limit)
    used = np.flatnonzero(scaled.whole)
    proto.objective.vars.extend(used.tolist())
    proto.objective.coeffs.extend(scaled.whole[used].tolist())
    if request.hint is not None:
        proto.solution_hint.vars.extend(range(program.columns))
        proto.solution_hint.values.extend(program.values(request.hint).astype(np.int64).tolist())


def _linear(proto: Any, columns: list[int], signs: list[int], low: int, high: int) -> None:
    linear = proto.constraints.add().linear
    linear.vars.extend(columns)
    linear.coeffs.extend(signs)
    linear.domain.extend((low, high))


def _split(rows: Ints, columns: Ints, signs: Ints) -> list[tuple[list[int], list[int]]]:
    """The triplets of (2), one list per equality."""
    order = np.argsort(rows, kind="stable")
    cuts = np.flatnonzero(np.diff(rows[order])) + 1
    parts = zip(np.split(columns[order], cuts), np.split(signs[order], cuts), strict=True)
    return [(part.tolist(), sign.tolist()) for part, sign in parts if len(part)]


def _listener(cp_model: Any, request: SolverRequest, scaled: Scaled) -> Any:
    program, report = request.program, request.on_solution

    class Listener(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            values = np.array(self.Response().solution[: int(program.offsets[-1])], dtype=np.float64)
            bound = self.BestObjectiveBound() / scaled.scale + program.constant - scaled.error
            assert report is not None
            report(program.choices(values), bound)

    return Listener()
