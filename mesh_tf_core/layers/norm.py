"""Normalisations with learned scales, and a learned scale of a block's output. Statistics of a batch that is
split are those of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.initializers import ONES, ZEROS, Constant
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import stop_gradient
from mesh_tf_core.ops.math import rsqrt, square
from mesh_tf_core.ops.norm import layer_norm, rms_norm
from mesh_tf_core.ops.reduce import reduce_mean


@dataclass(frozen=True)
class LayerNorm:
    """Mean 0 and variance 1 along `dim`, times a learned scale (Ba et al. 2016).

    Attributes:
      bias: adds a learned bias.
      epsilon: is added to the variance.
    """

    dim: str = "d_model"
    bias: bool = False
    name: str = "norm"
    epsilon: float = 1e-6

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x."""
        g, d = x.graph, x.dim(self.dim)
        with g.scope(self.name):
            scale = g.variable("scale", [d], ONES, activation_dtype=x.dtype)
            bias = g.variable("bias", [d], ZEROS, activation_dtype=x.dtype) if self.bias else None
            with g.in_call(g.path("layer_norm")):
                return layer_norm(x, d, scale, bias, self.epsilon)


@dataclass(frozen=True)
class RMSNorm:
    """Root mean square 1 along `dim`, times a learned scale (Zhang & Sennrich 2019).

    Attributes:
      epsilon: is added to the mean square.
    """

    dim: str = "d_model"
    name: str = "norm"
    epsilon: float = 1e-6

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x."""
        with x.graph.scope(self.name):
            scale = x.graph.variable("scale", [x.dim(self.dim)], ONES, activation_dtype=x.dtype)
            return rms_norm(x, self.dim, scale, self.epsilon)


@dataclass(frozen=True)
class ScaleNorm(RMSNorm):
    """Root mean square 1 along `dim`, times one learned number: length sqrt(d) x / |x| (Nguyen & Salazar
    2019, section 2.2)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x."""
        with x.graph.scope(self.name):
            return rms_norm(x, self.dim, epsilon=self.epsilon) * x.graph.variable(
                "scale", [], ONES, activation_dtype=x.dtype
            )


@dataclass(frozen=True)
class ReZero:
    """One learned number, at first 0, times the output of a residual block, which so begins as the identity:
    x + ReZero()(block(x)) (Bachlechner et al. 2021, "ReZero is all you need").

    Attributes:
      initial: the number at first.
    """

    initial: float = 0.0
    name: str = "rezero"

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x."""
        with x.graph.scope(self.name):
            return x * x.graph.variable("scale", [], Constant(self.initial), activation_dtype=x.dtype)


@dataclass(frozen=True)
class BatchNorm:
    """Mean 0 and variance 1 over the batch and all places, times a learned scale plus a learned bias (Ioffe &
    Szegedy 2015, algorithm 1).

    If a dimension of `dims` is split, sums run over the mesh, so the result is that of one device
    ("synchronised" batch normalisation). While it trains, every step moves the averages of mean and variance
    that inference uses; this needs the whole batch at once, so there are no microbatches (`GroupNorm` has no
    such limit).

    Attributes:
      dims: names of the dimensions of the statistics: the batch's and the spatial ones.
      training: False normalises with the moving averages, which are variables of the same names.
      momentum: share of a moving average that a step keeps.
      initial_scale: 0 makes a residual block begin as the identity (Goyal et al. 2017, section 5.1).
    """

    dims: tuple[str, ...]
    training: bool = True
    momentum: float = 0.9
    epsilon: float = 1e-5
    initial_scale: float = 1.0
    name: str = "norm"

    def __post_init__(self) -> None:
        if not self.dims:
            raise UserError("BatchNorm: `dims` must name at least one dimension, usually the batch")
        if not 0 <= self.momentum <= 1:
            raise UserError(f"BatchNorm: momentum must be from 0 to 1, found {self.momentum}")

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x [dims, others]; statistics are float32 [others]."""
        g = x.graph
        for name in self.dims:
            x.shape.index(name)
        own = x.shape.without(*self.dims)
        with g.scope(self.name):
            begin = (("moving_mean", ZEROS), ("moving_variance", ONES))
            averages = [g.variable(n, own.dims, initial, trainable=False) for n, initial in begin]
            mean, variance = self._statistics(x, averages) if self.training else averages
            scale = g.variable("scale", own.dims, Constant(self.initial_scale))
            bias = g.variable("bias", own.dims, ZEROS)
            y = (x.cast("float32") - mean) * (rsqrt(variance + self.epsilon) * scale) + bias
            return y.cast(x.dtype)

    def _statistics(self, x: Tensor, averages: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the batch; the moving averages move towards them."""
        wide = x.cast("float32")
        mean = reduce_mean(wide, self.dims)
        variance = reduce_mean(square(wide - mean), self.dims)
        for name, old, now in zip(("mean", "variance"), averages, (mean, variance), strict=True):
            moved = old * self.momentum + stop_gradient(now) * (1 - self.momentum)
            x.graph.assign(x.graph.lookup(f"moving_{name}"), moved)
        return mean, variance
