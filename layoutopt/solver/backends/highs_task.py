"""The messages between layoutopt and the process in which HiGHS runs: plain arrays."""

from __future__ import annotations

from dataclasses import dataclass

from layoutopt.solver.form import Floats, Ints


@dataclass(frozen=True, eq=False)
class LinearRow:
    """low <= sum of coefficients * columns <= high."""

    columns: Ints
    coefficients: Floats
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Task:
    """Minimise costs * x with 0 <= x <= upper, the first `whole` columns being integers."""

    costs: Floats
    upper: Floats
    whole: int
    lines: tuple[LinearRow, ...]
    time_limit: float | None
    seed: int
    dual_tolerance: float


@dataclass(frozen=True, eq=False)
class HighsAnswer:
    """MathOpt's reason to stop, its dual bound, and the columns' values if it has a solution."""

    reason: str
    dual_bound: float
    values: Floats | None
