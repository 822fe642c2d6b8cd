"""HiGHS through OR-tools' MathOpt: branch and cut over the exact local polytope.

HiGHS works in floating point: its answer is rounded to choices and evaluated by the caller, its bound is
lowered by its own feasibility tolerance. It runs on one thread, because MathOpt has no other option in this
release.

It runs in a separate process (`highs_process`): in one process, TensorFlow cannot be imported after MathOpt
(both bring pybind11_abseil), and MathOpt cannot be interrupted, whereas a process can be ended.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from layoutopt.runtime.own_process import OtherProcess
from layoutopt.solver.answer import Status
from layoutopt.solver.backends.base import Raw, SolverRequest, read_status
from layoutopt.solver.backends.highs_process import HighsAnswer, LinearRow, Task
from layoutopt.solver.linear import Constraint, LinearProgram

DUAL_TOLERANCE = 1e-10
"""HiGHS accepts reduced costs down to minus this. A solution has one column per group at 1, so the proven
bound exceeds the true one by at most this times the number of groups (weak duality: c x >= y b + sum of
reduced costs * x).
"""

LATE, PAUSE = 0.2, 0.005
"""Seconds after its time limit in which HiGHS may still answer, and between two looks for its answer."""

STATUSES = {
    **{s.name: s for s in Status if s is not Status.LIMIT},
    "INFEASIBLE_OR_UNBOUNDED": Status.INFEASIBLE,  # every column is 0 or 1: it cannot be unbounded
    **dict.fromkeys(("NO_SOLUTION_FOUND", "IMPRECISE"), Status.LIMIT),
}
"""MathOpt's termination reasons."""


PROCESS = "layoutopt.solver.backends.highs_process"
_lock = threading.Lock()
_worker: OtherProcess | None = None


def ask(
    task: Task, latest: float = math.inf, meanwhile: Callable[[], None] | None = None
) -> HighsAnswer | None:
    """The answer of a process that goes on to wait for the next task; None if there is none at the time
    `latest` (`time.monotonic`), which ends the process, as Ctrl-C does: HiGHS looks at its own limit only now
    and then.

    Raises:
      RuntimeError: the process died.
    """
    global _worker
    with _lock:
        if _worker is None or _worker.ended:
            leave()
            _worker = OtherProcess(PROCESS, task)
        else:
            _worker.tell(task)
        try:
            while True:
                ended = _worker.ended  # first: its last letter may come just before its end
                if _worker.news:
                    break
                if ended:
                    raise RuntimeError(
                        "the HiGHS worker process ended without an answer, perhaps for lack of memory"
                    )
                if time.monotonic() > latest:
                    leave()
                    return None
                (meanwhile or partial(time.sleep, PAUSE))()
        except BaseException:
            leave()
            raise
        found = _worker.news.popleft()
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, HighsAnswer)
    return found


def leave() -> None:
    """Ends the process, if it runs."""
    global _worker
    if _worker is not None:
        _worker.end()
        _worker = None


def solve(request: SolverRequest) -> Raw:
    """Solves the program with HiGHS in a process that Ctrl-C ends."""
    program = request.program
    unit = _unit(program)
    limit = request.time_limit
    latest = math.inf if limit is None else time.monotonic() + limit + LATE
    answer = ask(_task(request, unit), latest, request.meanwhile)
    return Raw(Status.LIMIT, None, -math.inf) if answer is None else _read(answer, program, unit)


def _read(answer: HighsAnswer, program: LinearProgram, unit: float) -> Raw:
    status = read_status("HiGHS", answer.reason, STATUSES)
    bound = -math.inf
    if math.isfinite(answer.dual_bound):
        doubt = DUAL_TOLERANCE * unit * (len(program.offsets) - 1 + len(program.joints))
        bound = answer.dual_bound * unit + program.constant - doubt
    if status is Status.INFEASIBLE:
        return Raw(status, None, math.inf)
    if status is Status.LIMIT or answer.values is None:
        return Raw(Status.LIMIT, None, bound)
    return Raw(status, program.choices(answer.values), bound)


def _unit(program: LinearProgram) -> float:
    """A power of two that brings costs near 1: HiGHS's tolerances are absolute."""
    sizes = np.abs(program.costs[program.costs != 0])
    return float(2.0 ** math.floor(math.log2(float(np.median(sizes))))) if sizes.size else 1.0


def _task(request: SolverRequest, unit: float) -> Task:
    """(1)-(6) of `linear` as plain data; joint columns are continuous."""
    program = request.program
    upper = np.ones(program.columns)
    upper[program.forbidden] = 0.0
    starts = program.offsets.tolist()
    groups = [
        LinearRow(np.arange(a, b, dtype=np.int64), np.ones(b - a), 1.0, 1.0)
        for a, b in itertools.pairwise(starts)
    ]
    rows, cells, signs = program.marginals
    order = np.argsort(rows, kind="stable")
    cuts = np.flatnonzero(np.diff(rows[order])) + 1
    parts = np.split(order, cuts) if len(order) else []
    marginals = [LinearRow(cells[part], signs[part].astype(float), 0.0, 0.0) for part in parts]
    limits = []
    for constraint in request.constraints:
        scale = _scale(constraint)
        limit = constraint.limit * scale
        low = limit if constraint.equality else -math.inf
        limits.append(LinearRow(constraint.columns, constraint.coefficients * scale, low, limit))
    return Task(
        program.costs / unit,
        upper,
        int(program.offsets[-1]),
        (*groups, *marginals, *limits),
        request.time_limit,
        DUAL_TOLERANCE,
    )


def _scale(constraint: Constraint) -> float:
    """A power of two that brings the row's largest coefficient near 1."""
    largest = float(np.abs(constraint.coefficients).max()) if len(constraint.coefficients) else 1.0
    return float(2.0 ** -math.floor(math.log2(largest)))
