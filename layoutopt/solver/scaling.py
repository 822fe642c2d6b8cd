"""Integer copies of real coefficients, with a bound on the rounding error.

CP-SAT counts in 64-bit integers. Costs that are whole already stay as they are (scale 1, error 0). Others are
multiplied by a power of two, so that the sum of the largest cost of every group stays below 2^`BITS`, and
rounded. A solution picks one column per group, so its true cost and its scaled cost differ by at most the sum
over groups of the largest rounding error: `Scaled.error`. A bound that the solver proves for the scaled costs
holds for the true ones minus this error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

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
