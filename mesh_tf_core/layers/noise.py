"""Noise whose strength depends on the step, or that is multiplicative."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import check_rate
from mesh_tf_core.ops.activations import clip
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.math import reciprocal
from mesh_tf_core.ops.random import random_uniform


@dataclass(frozen=True)
class AnnealedDropout:
    """Dropout with a rate that falls linearly from `rate` at step `start` to 0 at step `end` (Rennie et al.
    2014; Mesh-TensorFlow's annealed_dropout). The same elements are dropped under every layout.

    Attributes:
      start, end: steps; before the first the rate is constant, after the last nothing is dropped.
    """

    rate: float
    start: int
    end: int

    def __post_init__(self) -> None:
        check_rate(self, self.rate)
        if not 0 <= self.start < self.end:
            raise UserError(
                f"AnnealedDropout: start must be at least 0 and less than end, found start={self.start}, "
                f"end={self.end}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x."""
        done = (x.graph.step() - self.start).cast("float32") * (1 / (self.end - self.start))
        keep = clip(done, 0.0, 1.0) * self.rate + (1 - self.rate)
        kept = random_uniform(x.graph.random_key(), x.shape) < keep
        return where(kept, x * reciprocal(keep).cast(x.dtype), 0.0)


@dataclass(frozen=True)
class Jitter:
    """Times a random number in [1 - epsilon, 1 + epsilon) per element, so that a choice made from x, as a
    router's, does not hang on its last bits (Fedus et al. 2022, section 2.2; Mesh-TensorFlow's
    multiplicative_jitter)."""

    epsilon: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise UserError(f"Jitter: epsilon must be at least 0 and less than 1, found {self.epsilon}")

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x."""
        if not self.epsilon:
            return x
        low, high = 1 - self.epsilon, 1 + self.epsilon
        return x * random_uniform(x.graph.random_key(), x.shape, low, high).cast(x.dtype)
