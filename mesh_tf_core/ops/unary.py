"""Functions of one operand, element by element, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.kernel import UNARY, At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.kinds import Elementwise, FirstDerivative, need_fractions, same_dtype


def _gelu_grad(k: Kernel, dy: Any, x: Any, dtype: str) -> Any:
    """d/dx of 0.5 x (1 + tanh(c (x + 0.044715 x^3))), c = sqrt(2/pi) (Hendrycks & Gimpel 2016, section 2)."""
    c, a = k.scalar(math.sqrt(2 / math.pi), dtype), k.scalar(0.044715, dtype)
    half, one, three = (k.scalar(v, dtype) for v in (0.5, 1.0, 3.0))
    x2 = k.unary("square", x)
    ax2 = k.binary("mul", a, x2)
    t = k.unary("tanh", k.binary("mul", c, k.binary("mul", x, k.binary("add", one, ax2))))
    inner = k.binary("mul", c, k.binary("add", one, k.binary("mul", three, ax2)))
    slope = k.binary("mul", k.binary("mul", x, k.binary("sub", one, k.unary("square", t))), inner)
    return k.binary("mul", dy, k.binary("mul", half, k.binary("add", k.binary("add", one, t), slope)))


def _gelu_exact_grad(k: Kernel, dy: Any, x: Any, dtype: str) -> Any:
    """d/dx of x Φ(x), the normal distribution function: Φ(x) + x exp(-x²/2) / sqrt(2π)."""
    half, one, root = (k.scalar(v, dtype) for v in (0.5, 1.0, 0.5**0.5))
    z = k.binary("mul", x, root)
    below = k.binary("mul", half, k.binary("add", one, k.unary("erf", z)))
    return k.binary(
        "add", k.binary("mul", dy, below), _bell((2 * math.pi) ** -0.5)(k, k.binary("mul", dy, x), z, dtype)
    )


def _silu_grad(k: Kernel, dy: Any, x: Any, dtype: str) -> Any:
    s, one = k.unary("sigmoid", x), k.scalar(1.0, dtype)
    inner = k.binary("add", one, k.binary("mul", x, k.binary("sub", one, s)))
    return k.binary("mul", dy, k.binary("mul", s, inner))


def _mul(*factors: Callable[[Kernel, Any, str], Any]) -> Callable[[Kernel, Any, Any, str], Any]:
    def slope(k: Kernel, dy: Any, ref: Any, dtype: str) -> Any:
        for f in factors:
            dy = k.binary("mul", dy, f(k, ref, dtype))
        return dy

    return slope


def _one_minus(k: Kernel, v: Any, dtype: str) -> Any:
    return k.binary("sub", k.scalar(1.0, dtype), v)


def _bell(factor: float) -> Callable[[Kernel, Any, Any, str], Any]:
    """A multiple of exp(-x²)."""
    return _mul(
        lambda k, x, d: k.scalar(factor, d),
        lambda k, x, d: k.unary("exp", k.unary("neg", k.unary("square", x))),
    )


_SLOPES: dict[str, tuple[str, Callable[[Kernel, Any, Any, str], Any]]] = {
    "neg": ("y", lambda k, dy, y, d: k.unary("neg", dy)),
    "abs": ("x", _mul(lambda k, x, d: k.unary("sign", x))),
    "exp": ("y", _mul(lambda k, y, d: y)),
    "expm1": ("y", _mul(lambda k, y, d: k.binary("add", y, k.scalar(1.0, d)))),
    "log": ("x", lambda k, dy, x, d: k.binary("div", dy, x)),
    "log1p": ("x", lambda k, dy, x, d: k.binary("div", dy, k.binary("add", x, k.scalar(1.0, d)))),
    "sqrt": ("y", lambda k, dy, y, d: k.binary("div", k.binary("mul", dy, k.scalar(0.5, d)), y)),
    "rsqrt": (
        "y",
        _mul(lambda k, y, d: k.scalar(-0.5, d), lambda k, y, d: k.binary("mul", y, k.unary("square", y))),
    ),
    "square": ("x", _mul(lambda k, x, d: k.binary("add", x, x))),
    "reciprocal": ("y", _mul(lambda k, y, d: k.unary("neg", k.unary("square", y)))),
    "sin": ("x", _mul(lambda k, x, d: k.unary("cos", x))),
    "cos": ("x", _mul(lambda k, x, d: k.unary("neg", k.unary("sin", x)))),
    "tanh": ("y", _mul(lambda k, y, d: _one_minus(k, k.unary("square", y), d))),
    "sigmoid": ("y", _mul(lambda k, y, d: k.binary("mul", y, _one_minus(k, y, d)))),
    "atan": (
        "x",
        lambda k, dy, x, d: k.binary("div", dy, k.binary("add", k.unary("square", x), k.scalar(1.0, d))),
    ),
    "erf": ("x", _bell(2 / math.sqrt(math.pi))),
    "erfc": ("x", _bell(-2 / math.sqrt(math.pi))),
    "relu": ("y", _mul(lambda k, y, d: k.cast(k.binary("gt", y, k.scalar(0.0, d)), d))),
    "softplus": ("x", _mul(lambda k, x, d: k.unary("sigmoid", x))),
    **dict.fromkeys(("gelu", "gelu_fast", "gelu_new"), ("x", _gelu_grad)),
    "gelu_exact": ("x", _gelu_exact_grad),
    "silu": ("x", _silu_grad),
}
"""Function -> whether its derivative is written in its input x or its output y, and dy times the
derivative."""


@dataclass(frozen=True)
class Unary(Elementwise):
    """Applies a function to every element; the output has the input's shape."""

    fn: str

    def __post_init__(self) -> None:
        if self.fn not in UNARY:
            raise UserError(f"unknown element-wise function {self.fn!r}; {known_names(self.fn, UNARY)}")

    @property
    def name(self) -> str:
        return self.fn

    @property
    def vanishes(self) -> bool:  # type: ignore[override]
        return UNARY[self.fn].vanishes

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        if self.fn == "not" and x.dtype != "bool":
            raise UserError(f"not: the tensor must be bool, found {x}; cast or compare it first")
        if not UNARY[self.fn].whole:
            need_fractions(self.fn, x)
        return TensorType(x.shape, "bool" if UNARY[self.fn].gives_bool else x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.unary(self.fn, slices[0])

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * UNARY[self.fn].flops

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        if UNARY[self.fn].flat:
            return (None,)
        ref = inputs[0] if _SLOPES[self.fn][0] == "x" else output
        return (dy.graph.apply(UnaryGrad(self.fn), dy, ref),)

    def summand(self, dim: Dim, parts: Sequence[Tensor], constant: Sequence[bool]) -> Tensor | None:
        return unary(self.fn, parts[0]) if self.distributes(constant) else None

    def distributes(self, constant: Sequence[bool]) -> bool:
        return self.fn == "neg"


@dataclass(frozen=True)
class UnaryGrad(FirstDerivative, Elementwise):
    """dy times the derivative of `fn`, from its input or its output (see `_SLOPES`)."""

    fn: str

    @property
    def name(self) -> str:
        return self.fn + "_grad"

    def infer(self, *inputs: TensorType) -> TensorType:
        same_dtype(self.name, inputs)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return _SLOPES[self.fn][1](k, slices[0], slices[1], at.outputs[0].dtype)

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * (1 + UNARY[self.fn].flops)

    def distributes(self, constant: Sequence[bool]) -> bool:
        return constant[1] and not constant[0]


def unary(fn: str, x: Tensor) -> Tensor:
    """`fn` of every element (see ir.kernel.UNARY)."""
    return x.graph.apply(Unary(fn), x)
