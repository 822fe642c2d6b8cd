"""Learning rates that follow the step: an optimizer takes one wherever it takes a number.

Schedules are multiplied and added, with each other and with numbers: 0.01 * LinearWarmup(100) *
RsqrtDecay(100).

With t the number of the step, from 1, w the warm-up and p the peak, and a linear rise p t / w up to step w:
  WarmupRsqrt   p sqrt(w / t) afterwards                        (Vaswani et al. 2017, section 5.3)
  WarmupCosine  f p + (1 - f) p (1 + cos(pi u)) / 2             (Loshchilov & Hutter 2017, equation 5)
  WarmupLinear  p - (1 - f) p u
where u goes from 0 at step w to 1 at step `total`, and stays there. Factors, for products:
  LinearWarmup  min(1, t / w)
  RsqrtDecay    1 / sqrt(max(t, h))
  LinearDecay   1 up to step b, 0 from step e on, a line between
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.math import cos, maximum, minimum, rsqrt
from mesh_tf_core.tracing.graph import Graph


class Schedule:
    """A learning rate that follows the step."""

    def rate(self, graph: Graph) -> Tensor:
        """The float32 scalar of the step that the graph is running."""
        return self.at((graph.step() + 1).cast("float32"))

    def at(self, t: Tensor) -> Tensor:
        """The rate at step t (float32, from 1)."""
        raise NotImplementedError

    def __mul__(self, other: Schedule | float) -> Schedule:
        return _Joined("product", self, _part(other))

    def __add__(self, other: Schedule | float) -> Schedule:
        return _Joined("sum", self, _part(other))

    __rmul__, __radd__ = __mul__, __add__


SchedulePart = Schedule | float


def _part(value: SchedulePart) -> SchedulePart:
    if not isinstance(value, Schedule) and not (isinstance(value, float | int) and value > 0):
        raise UserError(
            "only schedules and positive numbers can be added to a schedule or multiplied by it, found "
            f"{value!r}"
        )
    return value


@dataclass(frozen=True)
class _Joined(Schedule):
    """The product or the sum of two schedules, of which the second may be a number."""

    how: str
    first: Schedule
    second: SchedulePart

    def at(self, t: Tensor) -> Tensor:
        x, y = self.first.at(t), self.second
        other = y.at(t) if isinstance(y, Schedule) else y
        return x * other if self.how == "product" else x + other


@dataclass(frozen=True)
class LinearWarmup(Schedule):
    """Rises from 1 / `steps` to 1 over the first `steps` steps."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"LinearWarmup: steps must be at least 1, found {self.steps}")

    def at(self, t: Tensor) -> Tensor:
        return minimum(t * (1.0 / self.steps), 1.0)


@dataclass(frozen=True)
class RsqrtDecay(Schedule):
    """1 / sqrt(max(t, hold)): constant up to step `hold`, then falls with the square root of the step."""

    hold: int = 1

    def __post_init__(self) -> None:
        if self.hold < 1:
            raise UserError(f"RsqrtDecay: hold must be at least 1 step, found {self.hold}")

    def at(self, t: Tensor) -> Tensor:
        return rsqrt(maximum(t, float(self.hold)))


@dataclass(frozen=True)
class LinearDecay(Schedule):
    """Is 1 up to step `begin`, then falls linearly to 0 at step `end`."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise UserError(
                f"LinearDecay: begin must be at least 0 and less than end, found begin={self.begin} and "
                f"end={self.end} steps"
            )

    def at(self, t: Tensor) -> Tensor:
        left = (constant_like(t, float(self.end)) - t) * (1.0 / (self.end - self.begin))
        return maximum(minimum(left, 1.0), 0.0)


@dataclass(frozen=True)
class _Warmup(Schedule):
    """A learning rate that rises to `peak` over the first `warmup` steps."""

    peak: float
    warmup: int

    def __post_init__(self) -> None:
        if not self.peak > 0:
            raise UserError(f"{type(self).__name__}: peak must be positive, found {self.peak}")
        if not 1 <= self.warmup < 1 << 63:
            raise UserError(
                f"{type(self).__name__}: warmup must be 1 to 2^63 - 1 steps, found {str(self.warmup)[:40]}"
            )

    def at(self, t: Tensor) -> Tensor:
        return minimum(t * (1.0 / self.warmup), self.decayed(t)) * self.peak

    def decayed(self, t: Tensor) -> Tensor:
        """The fraction of the peak at step t; more than 1, or 1, before the end of the warm-up."""
        raise NotImplementedError


@dataclass(frozen=True)
class WarmupRsqrt(_Warmup):
    """Falls with the inverse square root of the step after the warm-up."""

    def decayed(self, t: Tensor) -> Tensor:
        return rsqrt(t) * math.sqrt(self.warmup)


@dataclass(frozen=True)
class _Until(_Warmup):
    """Falls until step `total`, to the fraction `floor` of the peak."""

    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total <= self.warmup:
            raise UserError(
                f"{type(self).__name__}: total={self.total} steps must be more than warmup={self.warmup}"
            )
        if not 0 <= self.floor <= 1:
            raise UserError(
                f"{type(self).__name__}: floor must be from 0 to 1 (a fraction of the peak), found "
                f"{self.floor}"
            )

    def progress(self, t: Tensor) -> Tensor:
        """0 at the end of the warm-up, 1 from step `total` on; below 0 during the warm-up."""
        return minimum((t - float(self.warmup)) * (1.0 / (self.total - self.warmup)), 1.0)


@dataclass(frozen=True)
class WarmupCosine(_Until):
    """Falls along half a cosine from the peak to `floor` times the peak, after the warm-up."""

    def decayed(self, t: Tensor) -> Tensor:
        held = maximum(self.progress(t), 0.0)  # else the cosine would be below the rising line
        return (cos(held * math.pi) + 1.0) * (0.5 * (1 - self.floor)) + self.floor


@dataclass(frozen=True)
class WarmupLinear(_Until):
    """Falls linearly from the peak to `floor` times the peak, after the warm-up."""

    def decayed(self, t: Tensor) -> Tensor:
        return 1.0 - self.progress(t) * (1 - self.floor)
