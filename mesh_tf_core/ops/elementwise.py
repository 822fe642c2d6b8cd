"""Element-wise operations, with broadcasting by dimension name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mesh_tf_core.dims import Shape
from mesh_tf_core.dtypes import check_dtype, is_float
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.kernels.protocol import BINARY, UNARY, At, Kernel
from mesh_tf_core.op import Op, Roles, TensorType
from mesh_tf_core.ops.common import aligned, all_parallel, joined, listing, same_dtype
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.ops.reduce import sum_to

if TYPE_CHECKING:
    from mesh_tf_core.tensor import Tensor

_BOOL_RESULT = {"eq", "ne", "lt", "le", "gt", "ge", "and", "or"}
_COST = {"exp": 8, "log": 8, "tanh": 10, "sigmoid": 10, "erf": 12, "gelu": 16, "silu": 12, "pow": 12}
"""Arithmetic per element where it is far from one (vector-math libraries' polynomial lengths)."""


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
    "erf": (
        "x",
        _mul(
            lambda k, x, d: k.scalar(2 / math.sqrt(math.pi), d),
            lambda k, x, d: k.unary("exp", k.unary("neg", k.unary("square", x))),
        ),
    ),
    "relu": ("y", _mul(lambda k, y, d: k.cast(k.binary("gt", y, k.scalar(0.0, d)), d))),
    "softplus": ("x", _mul(lambda k, x, d: k.unary("sigmoid", x))),
    "gelu": ("x", _gelu_grad),
    "silu": ("x", _silu_grad),
}
"""Function -> whether its derivative is written in its input x or its output y, and dy times the derivative."""

_NO_GRADIENT = ("sign", "floor", "not", "is_finite")


@dataclass(frozen=True)
class Unary(Op):
    """Applies a function to every element; the output has the input's shape."""

    fn: str

    def __post_init__(self) -> None:
        if self.fn not in UNARY:
            raise UserError(f"element-wise function {self.fn!r}: {known_names(self.fn, UNARY)}")

    @property
    def name(self) -> str:
        return self.fn

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        if self.fn == "not" and x.dtype != "bool":
            raise UserError(f"not: needs bool, found {x}")
        return TensorType(x.shape, "bool" if self.fn in ("not", "is_finite") else x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.unary(self.fn, slices[0])

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * _COST.get(self.fn, 1)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        if self.fn in _NO_GRADIENT:
            return (None,)
        ref = inputs[0] if _SLOPES[self.fn][0] == "x" else output
        return (dy.graph.apply(UnaryGrad(self.fn), dy, ref),)


@dataclass(frozen=True)
class UnaryGrad(Op):
    """dy times the derivative of `fn`, from its input or its output (see `_SLOPES`)."""

    fn: str

    @property
    def name(self) -> str:
        return self.fn + "_grad"

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        same_dtype(self.name, inputs)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return _SLOPES[self.fn][1](k, slices[0], slices[1], at.outputs[0].dtype)

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * (1 + _COST.get(self.fn, 1))

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        raise UserError(f"the second derivative of {self.fn} is not defined; use stop_gradient on the first")


@dataclass(frozen=True)
class Binary(Op):
    """Two operands, element by element; dimensions that one lacks are broadcast."""

    fn: str

    def __post_init__(self) -> None:
        if self.fn not in BINARY:
            raise UserError(f"element-wise function {self.fn!r}: {known_names(self.fn, BINARY)}")

    @property
    def name(self) -> str:
        return self.fn

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """A sum waits behind additions and subtractions of equally pending operands."""
        return self.fn in ("add", "sub")

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        dtype = same_dtype(self.fn, inputs)
        if self.fn in ("and", "or") and dtype != "bool":
            raise UserError(f"{self.fn} of {listing(inputs)}: needs bool")
        return TensorType(joined(self.fn, inputs), "bool" if self.fn in _BOOL_RESULT else dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, y = aligned(k, at, slices)
        return k.binary(self.fn, x, y)

    def flops(self, *local: TensorType) -> float:
        return joined(self.fn, local).size * _COST.get(self.fn, 1)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, y = inputs
        if not is_float(x.dtype) or self.fn in _BOOL_RESULT:
            return (None, None)
        return _BINARY_GRADIENTS[self.fn](dy, x, y, output, sum_to)


def _product_gradient(dy: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """dy * b summed to a's dimensions: one contraction instead of a product and a sum."""
    if set(dy.shape.names) == set(a.shape.names):
        return binary("mul", dy, b)
    return dy.graph.apply(Einsum(a.shape), dy, b)


def _pow_gradient(dy: Tensor, x: Tensor, y: Tensor, out: Tensor, to: Any) -> Sequence[Tensor | None]:
    exponent = binary("pow", x, shift(y, -1.0))
    return to(binary("mul", dy, binary("mul", y, exponent)), x.shape), to(
        binary("mul", dy, binary("mul", out, unary("log", x))), y.shape
    )


def _extreme_gradient(dy: Tensor, x: Tensor, y: Tensor, out: Tensor, to: Any) -> Sequence[Tensor | None]:
    first = cast(binary("eq", x, out), dy.dtype)
    return to(binary("mul", dy, first), x.shape), to(
        binary("mul", dy, shift(scale(first, -1.0), 1.0)), y.shape
    )


_BINARY_GRADIENTS: dict[str, Callable[..., Sequence[Any]]] = {
    "add": lambda dy, x, y, out, to: (to(dy, x.shape), to(dy, y.shape)),
    "sub": lambda dy, x, y, out, to: (to(dy, x.shape), scale(to(dy, y.shape), -1.0)),
    "mul": lambda dy, x, y, out, to: (_product_gradient(dy, x, y), _product_gradient(dy, y, x)),
    "div": lambda dy, x, y, out, to: (
        to(binary("div", dy, y), x.shape),
        scale(_product_gradient(binary("div", dy, y), y, out), -1.0),
    ),
    "max": _extreme_gradient,
    "min": _extreme_gradient,
    "pow": _pow_gradient,
    "mod": lambda dy, x, y, out, to: (
        to(dy, x.shape),
        scale(_product_gradient(dy, y, binary("floordiv", x, y)), -1.0),
    ),
    "floordiv": lambda dy, x, y, out, to: (None, None),
}


@dataclass(frozen=True)
class AddN(Op):
    """Adds operands of equal dimensions (the sum of a tensor's gradients)."""

    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        dtype = same_dtype("add_n", inputs)
        if any(set(t.shape.dims) != set(inputs[0].shape.dims) for t in inputs):
            raise UserError(f"add_n of {listing(inputs)}: all operands need the same dimensions")
        return TensorType(inputs[0].shape, dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        total, *rest = aligned(k, at, slices)
        for x in rest:
            total = k.binary("add", total, x)
        return total

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * (len(local) - 1)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return [dy] * len(inputs)


@dataclass(frozen=True)
class Scale(Op):
    """Multiplies by a constant."""

    factor: float
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.binary("mul", slices[0], k.scalar(self.factor, at.outputs[0].dtype))

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (scale(dy, self.factor),)


@dataclass(frozen=True)
class Shift(Op):
    """Adds a constant."""

    offset: float

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.binary("add", slices[0], k.scalar(self.offset, at.outputs[0].dtype))

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy,)


@dataclass(frozen=True)
class Cast(Op):
    """Changes the element type. `bool` and integers have no gradient."""

    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.cast(slices[0], self.dtype)

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (cast(dy, inputs[0].dtype) if is_float(inputs[0].dtype) else None,)


@dataclass(frozen=True)
class Where(Op):
    """Takes x where the condition holds, else y; broadcast by name."""

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        condition, x, y = inputs
        if condition.dtype != "bool":
            raise UserError(f"where of {listing(inputs)}: the condition needs bool")
        return TensorType(joined("where", (x, y, condition)), same_dtype("where", (x, y)))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.where(*aligned(k, at, slices))

    def flops(self, *local: TensorType) -> float:
        return joined("where", local).size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        condition, x, y = inputs
        zero = constant_like(dy, 0.0)
        return (
            None,
            sum_to(where(condition, dy, zero), x.shape),
            sum_to(where(condition, zero, dy), y.shape),
        )


@dataclass(frozen=True)
class Constant(Op):
    """A scalar of one value."""

    value: float
    dtype: str
    kind: ClassVar[str] = "data"
    free: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles()

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape(), check_dtype(self.dtype))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.full((), self.value, self.dtype)

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return ()


@dataclass(frozen=True)
class StopGradient(Op):
    """The identity, through which no gradient flows."""

    linear: ClassVar[bool] = True
    kind: ClassVar[str] = "data"
    free: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return slices[0]

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (None,)


def unary(fn: str, x: Tensor) -> Tensor:
    return x.graph.apply(Unary(fn), x)


def binary(fn: str, x: Tensor | float, y: Tensor | float) -> Tensor:
    """Element-wise `fn`; a Python number becomes a constant of the other operand's dtype."""
    if isinstance(x, int | float):
        if isinstance(y, int | float):
            raise UserError(f"{fn} of two numbers ({x}, {y}): one operand must be a tensor")
        if fn in ("add", "mul"):
            return shift(y, x) if fn == "add" else scale(y, x)
        x = constant_like(y, x)
    elif isinstance(y, int | float):
        simple = {"add": shift, "mul": scale, "sub": lambda t, v: shift(t, -v)}
        if is_float(x.dtype) and fn == "div":
            return scale(x, 1.0 / y)
        if fn in simple:
            return simple[fn](x, y)
        y = constant_like(x, y)
    return x.graph.apply(Binary(fn), x, y)


def add_n(xs: Sequence[Tensor]) -> Tensor:
    """Sum of tensors of equal dimensions; one tensor is returned as it is."""
    return xs[0] if len(xs) == 1 else xs[0].graph.apply(AddN(), *xs)


def scale(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x.graph.apply(Scale(factor), x)


def shift(x: Tensor, offset: float) -> Tensor:
    return x if offset == 0 else x.graph.apply(Shift(offset), x)


def cast(x: Tensor, dtype: str) -> Tensor:
    return x if x.dtype == dtype else x.graph.apply(Cast(dtype), x)


def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    """x where the condition holds, else y; at least one of x and y is a tensor."""
    if isinstance(x, int | float):
        if isinstance(y, int | float):
            raise UserError("where: one of the two choices must be a tensor, found two numbers")
        x = constant_like(y, x)
    elif isinstance(y, int | float):
        y = constant_like(x, y)
    return condition.graph.apply(Where(), condition, x, y)


def constant_like(x: Tensor, value: float) -> Tensor:
    """A scalar in x's graph and dtype."""
    return x.graph.apply(Constant(value, x.dtype))


def stop_gradient(x: Tensor) -> Tensor:
    return x.graph.apply(StopGradient(), x)
