"""Clipping, the piecewise activation functions, and functions with corners with JAX's derivatives there: two
equal operands get half of the gradient each; the slope of |x| at 0 is 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import cast, constant_like, scale
from mesh_tf_core.ops.binary import Binary, binary, where
from mesh_tf_core.ops.kinds import Elementwise, check_number
from mesh_tf_core.ops.reduce import sum_to
from mesh_tf_core.ops.unary import Unary, unary

SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
"""Fixed point of mean 0 and variance 1 (Klambauer et al. 2017, equation 14)."""


@dataclass(frozen=True)
class Clip(Elementwise):
    """The nearest number in [low, high]; outside, the gradient is zero."""

    low: float
    high: float
    element_flops: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise UserError(f"clip: low must be at most high, found low={self.low}, high={self.high}")

    def infer(self, *inputs: TensorType) -> TensorType:
        for bound in filter(math.isfinite, (self.low, self.high)):
            check_number("clip", bound, inputs[0].dtype)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, dtype = slices[0], at.outputs[0].dtype
        if math.isfinite(self.low):
            x = k.binary("max", x, k.scalar(self.low, dtype))
        return k.binary("min", x, k.scalar(self.high, dtype)) if math.isfinite(self.high) else x

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        # Clipped again, so that the input alone is kept.
        same = inputs[0].equal(clip(inputs[0], self.low, self.high))
        return (where(same, dy, constant_like(dy, 0.0)),)


def clip(x: Tensor, low: float = -math.inf, high: float = math.inf) -> Tensor:
    """Clips every element to [low, high]."""
    return x.graph.apply(Clip(low, high), x)


def leaky_relu(x: Tensor, alpha: float = 0.2) -> Tensor:
    """x if positive, else alpha * x (Maas et al. 2013)."""
    return where(x > 0.0, x, x * alpha)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x if positive, else alpha * (exp(x) - 1) (Clevert et al. 2016)."""
    # The exponential of what is chosen away would overflow, and its gradient would be 0 * inf.
    return where(x > 0.0, x, unary("expm1", clip(x, high=0.0)) * alpha)


def selu(x: Tensor) -> Tensor:
    """Self-normalising exponential linear unit (Klambauer et al. 2017)."""
    return elu(x, SELU_ALPHA) * SELU_SCALE


def logical_xor(x: Tensor, y: Tensor) -> Tensor:
    """True where exactly one of two holds."""
    return binary("ne", x.cast("int32"), y.cast("int32"))


@dataclass(frozen=True)
class Extreme(Binary):
    """The larger or the smaller of two (`fn` is max or min); equal operands share the gradient."""

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, y = inputs
        if not is_float(x.dtype):
            return (None, None)
        shared = scale(cast(binary("eq", x, y), dy.dtype), 0.5)

        def part(of: Tensor, other: Tensor) -> Tensor:
            alone = cast(binary("gt" if self.fn == "max" else "lt", of, other), dy.dtype)
            return sum_to(binary("mul", dy, binary("add", alone, shared)), of.shape)

        return part(x, y), part(y, x)


@dataclass(frozen=True)
class Modulus(Unary):
    """Absolute value with slope 1 at 0."""

    fn: str = "abs"

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        (x,) = inputs
        return (where(binary("ge", x, 0.0), dy, unary("neg", dy)),)


def extreme(fn: str, x: Tensor | float, y: Tensor | float) -> Tensor:
    """max or min of two, as `Extreme`; a number becomes a constant of the other operand's dtype."""
    if not isinstance(x, Tensor):
        assert isinstance(y, Tensor)
        x = constant_like(y, x, fn)
    y = y if isinstance(y, Tensor) else constant_like(x, y, fn)
    found: Tensor = x.graph.apply(Extreme(fn), x, y)
    return found


def modulus(x: Tensor) -> Tensor:
    """Absolute value, as `Modulus`."""
    found: Tensor = x.graph.apply(Modulus(), x)
    return found
