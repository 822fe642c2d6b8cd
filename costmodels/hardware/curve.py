r"""Measured curves: piecewise linear, and never falling.

(1) y(x) = y_i + (x - x_i) (y_{i+1} - y_i) / (x_{i+1} - x_i) for x between two points;
(2) y(x) = y_0 below the first point: what is measured there is latency;
(3) y(x) = y_n + slope (x - x_n) above the last one, with the slope of the last interval, but never less than
    proportional growth when that interval is flat.

A curve fitted to noisy measurements is made monotone by pooling adjacent violators (Ayer et al. 1955), so no
cost model predicts that more bytes take less time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean


@dataclass(frozen=True, slots=True)
class Curve:
    """Non-decreasing piecewise-linear curve through `points`, pairs (x, y) with x rising; x, y >= 0."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if fault := curve_fault(self.points):
            raise ValueError(fault)

    def __call__(self, x: float) -> float:
        """The curve at `x` by equations (1) to (3)."""
        points = self.points
        if x <= points[0][0]:
            return points[0][1]
        if x >= points[-1][0]:
            return self._beyond(x)
        right = bisect_right(points, x, key=lambda p: p[0])
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (x - x0) * (y1 - y0) / (x1 - x0)

    def _beyond(self, x: float) -> float:
        x1, y1 = self.points[-1]
        slope = 0.0
        if len(self.points) > 1:
            x0, y0 = self.points[-2]
            slope = (y1 - y0) / (x1 - x0)
        if slope <= 0.0 and x1 > 0:
            slope = y1 / x1
        return y1 + slope * (x - x1)


def curve_fault(points: Iterable[tuple[float, float]]) -> str | None:
    """The fault of `points` as a curve, in words; None if there is none."""
    points = tuple(points)
    if not points:
        return "the curve has no points; give at least one"
    if any(x < 0 or y < 0 for x, y in points):
        return "the curve has a negative coordinate; give values of at least 0"
    for (x0, y0), (x1, y1) in pairwise(points):
        if x1 <= x0:
            return f"the x values of the curve must increase, but {x1:g} follows {x0:g}"
        if y1 < y0:
            return (
                f"the curve must not decrease, but y falls from {y0:g} to {y1:g} between x = {x0:g} and x "
                f"= {x1:g}"
            )
    return None


def monotone(samples: Iterable[tuple[float, float]]) -> Curve:
    """The non-decreasing curve nearest to noisy `samples` (least squares; equal x are averaged)."""
    from scipy.optimize import isotonic_regression

    by_x: dict[float, list[float]] = {}
    for x, y in samples:
        by_x.setdefault(float(x), []).append(float(y))
    order = sorted(by_x)
    found = isotonic_regression([mean(by_x[x]) for x in order], weights=[len(by_x[x]) for x in order])
    return Curve(tuple(zip(order, found.x.tolist(), strict=True)))
