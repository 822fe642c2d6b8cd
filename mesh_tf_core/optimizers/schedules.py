"""Learning rates that follow the step: an optimizer takes one wherever it takes a number.

With t the number of the step, from 1, w the warm-up and p the peak, and a linear rise p t / w up to step w:
  WarmupRsqrt   p sqrt(w / t) afterwards                        (Vaswani et al. 2017, section 5.3)
  WarmupCosine  f p + (1 - f) p (1 + cos(pi u)) / 2             (Loshchilov & Hutter 2017, equation 5)
  WarmupLinear  p - (1 - f) p u
where u goes from 0 at step w to 1 at step `total`, and stays there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.graph import Graph
from mesh_tf_core.ops.math import cos, maximum, minimum, rsqrt
from mesh_tf_core.tensor import Tensor


@dataclass(frozen=True)
class Schedule:
    """A learning rate that rises to `peak` over the first `warmup` steps."""

    peak: float
    warmup: int

    def __post_init__(self) -> None:
        if not self.peak > 0:
            raise UserError(f"{type(self).__name__}: peak must be positive, found {self.peak}")
        if self.warmup < 1:
            raise UserError(f"{type(self).__name__}: warmup must be at least 1 step, found {self.warmup}")

    def rate(self, graph: Graph) -> Tensor:
        """The float32 scalar of the step that the graph is running."""
        t = (graph.step() + 1).cast("float32")
        return minimum(t * (1.0 / self.warmup), self.decayed(t)) * self.peak

    def decayed(self, t: Tensor) -> Tensor:
        """The fraction of the peak at step t; more than 1, or 1, before the end of the warm-up."""
        raise NotImplementedError


@dataclass(frozen=True)
class WarmupRsqrt(Schedule):
    """Falls with the inverse square root of the step after the warm-up."""

    def decayed(self, t: Tensor) -> Tensor:
        return rsqrt(t) * math.sqrt(self.warmup)


@dataclass(frozen=True)
class _Until(Schedule):
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
                f"{type(self).__name__}: floor is a fraction of the peak, 0 to 1; found {self.floor}"
            )

    def progress(self, t: Tensor) -> Tensor:
        """0 at the end of the warm-up, 1 from step `total` on; below 0 during the warm-up."""
        return minimum((t - float(self.warmup)) * (1.0 / (self.total - self.warmup)), 1.0)


@dataclass(frozen=True)
class WarmupCosine(_Until):
    """Half a cosine from the peak to `floor` times the peak."""

    def decayed(self, t: Tensor) -> Tensor:
        held = maximum(self.progress(t), 0.0)  # else the cosine would be below the rising line
        return (cos(held * math.pi) + 1.0) * (0.5 * (1 - self.floor)) + self.floor


@dataclass(frozen=True)
class WarmupLinear(_Until):
    """A line from the peak to `floor` times the peak."""

    def decayed(self, t: Tensor) -> Tensor:
        return 1.0 - self.progress(t) * (1 - self.floor)
