"""HiGHS through OR-tools' MathOpt: branch and cut over the exact local polytope.

HiGHS works in floating point: its answer is rounded to choices and evaluated by the caller, its bound is
lowered by its own feasibility tolerance. It runs on one thread, because MathOpt has no other option in this
release.

It runs in a separate process (`highs_process`): in one process, TensorFlow cannot be imported after MathOpt
(both bring pybind11_abseil), and MathOpt cannot be interrupted, whereas a process can be ended.
"""

from __future__ import annotations

import atexit
import itertools
import math
import pickle
import subprocess
import threading
import time
from collections.abc import Callable

import numpy as np

from layoutopt.runtime.own_process import command
from layoutopt.solver.answer import Status
from layoutopt.solver.backends.base import Raw, SolverRequest, interruptible, read_status
from layoutopt.solver.backends.highs_process import HighsAnswer, LinearRow, Task
from layoutopt.solver.linear import Constraint, LinearProgram

DUAL_TOLERANCE = 1e-10
"""HiGHS accepts reduced costs down to minus this. A solution has one column per group at 1, so the proven
bound exceeds the true one by at most this times the number of groups (weak duality: c x >= y b + sum of
reduced costs * x).
"""

LATE = 0.2
"""Seconds after its time limit in which HiGHS may still answer."""

STATUSES = {
    **{s.name: s for s in Status if s is not Status.LIMIT},
    "INFEASIBLE_OR_UNBOUNDED": Status.INFEASIBLE,  # every column is 0 or 1: it cannot be unbounded
    **dict.fromkeys(("NO_SOLUTION_FOUND", "IMPRECISE"), Status.LIMIT),
}
"""MathOpt's termination reasons."""


class Worker:
    """A process that solves tasks, from the first one on; it starts again after it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.end)

    def ask(self, task: Task) -> HighsAnswer:
        """The process's answer; RuntimeError if it died."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                pickle.dump(task, process.stdin)
                process.stdin.flush()
                found = pickle.load(process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                self.end()
                raise RuntimeError(
                    "the HiGHS worker process ended without an answer, perhaps for lack of memory"
                ) from None
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, HighsAnswer)
        return found

    def end(self) -> None:
        """Ends the process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                command("layoutopt.solver.backends.highs_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends this process
            )
        return self._process


_worker = Worker()


def solve(request: SolverRequest) -> Raw:
    """Solves the program with HiGHS in a process that Ctrl-C ends."""
    program = request.program
    unit = _unit(program)
    task = _task(request, unit)
    try:
        answer = interruptible(lambda: _worker.ask(task), _leave, _over(request), request.meanwhile)
    except _LeftError:
        return Raw(Status.LIMIT, None, -math.inf)
    return _read(answer, program, unit)


def _over(request: SolverRequest) -> Callable[[], bool]:
    """Whether to end the process: it looks at its own limit only now and then."""
    limit = request.options.time_limit
    latest = math.inf if limit is None else time.monotonic() + limit + LATE
    return lambda: time.monotonic() > latest


class _LeftError(Exception):
    pass


def _leave() -> None:
    _worker.end()
    raise _LeftError


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
        request.options.time_limit,
        request.options.seed,
        DUAL_TOLERANCE,
    )


def _scale(constraint: Constraint) -> float:
    """A power of two that brings the row's largest coefficient near 1."""
    largest = float(np.abs(constraint.coefficients).max()) if len(constraint.coefficients) else 1.0
    return float(2.0 ** -math.floor(math.log2(largest)))
