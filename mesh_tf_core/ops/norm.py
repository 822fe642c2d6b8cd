"""Layer and root-mean-square normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.kinds import AlongWhole, FirstDerivative, Reduction, aligned
from mesh_tf_core.ops.math import rsqrt, square
from mesh_tf_core.ops.reduce import names_of, reduce_mean


@dataclass(frozen=True)
class _Norm(AlongWhole, Reduction, abstract=True):
    """Mean and variance along some dimensions."""

    dim: tuple[str, ...]
    epsilon: float
    center: bool
    why: ClassVar[str] = "mean and variance are taken over the whole dimension"

    def parts(self, k: Kernel, at: At, x: Any) -> tuple[Any, Any]:
        """The normalised tensor and 1 / standard deviation."""
        dtype = at.outputs[0].dtype
        if self.center:
            x = k.binary("sub", x, self.mean(k, at, x))
        variance = self.mean(k, at, k.unary("square", x))
        rstd = k.unary("rsqrt", k.binary("add", variance, k.scalar(self.epsilon, dtype)))
        return k.binary("mul", x, rstd), rstd

    def mean(self, k: Kernel, at: At, x: Any) -> Any:
        """The mean, whose axes stay with one element."""
        shape, dtype = at.outputs[0].shape, at.outputs[0].dtype
        axes = [shape.index(name) for name in self.dim]
        kept = [1 if i in axes else s for i, s in enumerate(shape.sizes)]
        total = k.reshape(k.reduce("sum", x, axes), kept)
        return k.binary("mul", total, k.scalar(1.0 / math.prod(shape.sizes[i] for i in axes), dtype))


@dataclass(frozen=True)
class Normalize(_Norm):
    """(x - mean) / sqrt(variance + epsilon) along some dimensions; without `center`, x / rms (Zhang &
    Sennrich 2019)."""

    element_flops: ClassVar[float] = 6.0

    def infer(self, *inputs: TensorType) -> TensorType:
        for name in self.dim:
            inputs[0].shape.index(name)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return self.parts(k, at, slices[0])[0]

    def expand(self, *inputs: Tensor) -> Tensor:
        x = inputs[0]
        x = x - reduce_mean(x, self.dim) if self.center else x
        return x * rsqrt(reduce_mean(square(x), self.dim) + self.epsilon)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(NormalizeGrad(self.dim, self.epsilon, self.center), dy, inputs[0]),)


@dataclass(frozen=True)
class NormalizeGrad(FirstDerivative, _Norm):
    """rstd (dy - mean(dy) - y mean(dy y)) from (dy, x); without `center`, mean(dy) is left out."""

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[1]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        dy, x = aligned(k, at, slices)
        y, rstd = self.parts(k, at, x)
        dx = k.binary("sub", dy, k.binary("mul", y, self.mean(k, at, k.binary("mul", dy, y))))
        if self.center:
            dx = k.binary("sub", dx, self.mean(k, at, dy))
        return k.binary("mul", rstd, dx)

    def flops(self, *local: TensorType) -> float:
        return 12.0 * local[1].shape.size

    def expand(self, *inputs: Tensor) -> Tensor:
        dy, x = inputs
        x = x - reduce_mean(x, self.dim) if self.center else x
        rstd = rsqrt(reduce_mean(square(x), self.dim) + self.epsilon)
        y = x * rstd
        dx = dy - y * reduce_mean(dy * y, self.dim)
        return rstd * (dx - reduce_mean(dy, self.dim) if self.center else dx)


def normalize(
    x: Tensor, dims: Dim | str | Sequence[Dim | str], epsilon: float = 1e-6, center: bool = True
) -> Tensor:
    """x with mean 0 and variance 1 along `dims` (without `center`: root mean square 1)."""
    return x.graph.apply(Normalize(names_of(x, dims), epsilon, center), x)


def layer_norm(
    x: Tensor, dim: Dim | str, scale: Tensor | None = None, bias: Tensor | None = None, epsilon: float = 1e-6
) -> Tensor:
    """Layer normalisation (Ba et al. 2016) with optional learned scale and bias [dim]."""
    y = normalize(x, dim, epsilon)
    y = y * scale if scale is not None else y
    return y + bias if bias is not None else y


def rms_norm(x: Tensor, dim: Dim | str, scale: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """Root-mean-square normalisation (Zhang & Sennrich 2019) with an optional learned scale [dim]."""
    y = normalize(x, dim, epsilon, center=False)
    return y * scale if scale is not None else y
