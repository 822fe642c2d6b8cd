"""Normalisations with learned scales, and a learned scale of a block's output."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.ir.initializers import ONES, ZEROS, Constant
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.norm import layer_norm, rms_norm


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
