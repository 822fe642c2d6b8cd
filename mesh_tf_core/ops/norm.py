"""Layer and root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.common import aligned
from mesh_tf_core.ops.kinds import AlongWhole, FirstDerivative, Reduction
from mesh_tf_core.ops.math import rsqrt, square
from mesh_tf_core.ops.reduce import reduce_mean


def _mean(k: Kernel, x: Any, axis: int, sizes: Sequence[int], dtype: str) -> Any:
    kept = [1 if i == axis else s for i, s in enumerate(sizes)]
    total = k.reshape(k.reduce("sum", x, [axis]), kept)
    return k.binary("mul", total, k.scalar(1.0 / sizes[axis], dtype))


@dataclass(frozen=True)
class Normalize(AlongWhole, Reduction):
    """(x - mean) / sqrt(variance + epsilon) along one dimension; without `center`, x / rms (Zhang & Sennrich
    2019)."""

    epsilon: float
    center: bool
    why: ClassVar[str] = "mean and variance are taken over the whole dimension"
    element_flops: ClassVar[float] = 6.0

    def infer(self, *inputs: TensorType) -> TensorType:
        inputs[0].shape.index(self.dim)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return self.parts(k, at, slices[0])[0]

    def parts(self, k: Kernel, at: At, x: Any) -> tuple[Any, Any]:
        """The normalised tensor and 1 / standard deviation."""
        dtype, shape = at.outputs[0].dtype, at.outputs[0].shape
        axis = shape.index(self.dim)
        if self.center:
            x = k.binary("sub", x, _mean(k, x, axis, shape.sizes, dtype))
        variance = _mean(k, k.unary("square", x), axis, shape.sizes, dtype)
        rstd = k.unary("rsqrt", k.binary("add", variance, k.scalar(self.epsilon, dtype)))
        return k.binary("mul", x, rstd), rstd

    def expand(self, *inputs: Tensor) -> Tensor:
        x = inputs[0]
        x = x - reduce_mean(x, self.dim) if self.center else x
        return x * rsqrt(reduce_mean(square(x), self.dim) + self.epsilon)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        grad = NormalizeGrad(self.dim, self.epsilon, self.center)
        return (dy.graph.apply(grad, dy, inputs[0]),)


@dataclass(frozen=True)
class NormalizeGrad(FirstDerivative, AlongWhole, Reduction):
    """rstd (dy - mean(dy) - y mean(dy y)) from (dy, x); without `center`, mean(dy) is left out."""

    epsilon: float
    center: bool
    why: ClassVar[str] = "mean and variance are taken over the whole dimension"

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[1]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        dy, x = aligned(k, at, slices)
        shape, dtype = at.outputs[0].shape, at.outputs[0].dtype
        axis = shape.index(self.dim)
        y, rstd = Normalize(self.dim, self.epsilon, self.center).parts(k, at, x)
        inner = _mean(k, k.binary("mul", dy, y), axis, shape.sizes, dtype)
        dx = k.binary("sub", dy, k.binary("mul", y, inner))
        if self.center:
            dx = k.binary("sub", dx, _mean(k, dy, axis, shape.sizes, dtype))
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


def normalize(x: Tensor, dim: Dim | str, epsilon: float = 1e-6, center: bool = True) -> Tensor:
    """x with mean 0 and variance 1 along `dim` (without `center`: root mean square 1)."""
    return x.graph.apply(Normalize(dim.name if isinstance(dim, Dim) else dim, epsilon, center), x)


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
