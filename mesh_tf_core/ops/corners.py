"""Functions with corners and JAX's derivatives there: two equal operands get half of the gradient each; the
slope of |x| at 0 is 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import cast, constant_like, scale
from mesh_tf_core.ops.binary import Binary, binary, where
from mesh_tf_core.ops.reduce import sum_to
from mesh_tf_core.ops.unary import Unary, unary


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
