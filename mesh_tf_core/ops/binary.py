"""Functions of two operands, element by element, with broadcasting by dimension name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.kernel import BINARY, At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import cast, constant_like, scale, shift
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.ops.kinds import Elementwise, aligned, joined, listing, need_fractions, same_dtype
from mesh_tf_core.ops.reduce import sum_to
from mesh_tf_core.ops.unary import unary


@dataclass(frozen=True)
class Binary(Elementwise):
    """Two operands, element by element; dimensions that one lacks are broadcast."""

    fn: str

    def __post_init__(self) -> None:
        if self.fn not in BINARY:
            raise UserError(f"unknown element-wise function {self.fn!r}; {known_names(self.fn, BINARY)}")

    @property
    def name(self) -> str:
        return self.fn

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """A sum waits behind additions and subtractions of equally pending operands."""
        return self.fn in ("add", "sub")

    def infer(self, *inputs: TensorType) -> TensorType:
        dtype = same_dtype(self.fn, inputs)
        if self.fn in ("and", "or") and dtype != "bool":
            raise UserError(f"{self.fn} of {listing(inputs)}: both operands must be bool; cast them first")
        if self.divides:
            need_fractions("div", inputs[0], "mtf.floordiv")
        return TensorType(joined(self.fn, inputs), "bool" if BINARY[self.fn].gives_bool else dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, y = aligned(k, at, slices)
        return k.binary(self.fn, x, y)

    def flops(self, *local: TensorType) -> float:
        return joined(self.fn, local).size * BINARY[self.fn].flops

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, y = inputs
        if not is_float(x.dtype) or BINARY[self.fn].gives_bool:
            return (None, None)
        return _BINARY_GRADIENTS[self.fn](dy, x, y, output, sum_to)

    @property
    def divides(self) -> bool:  # type: ignore[override]
        return self.fn == "div"

    def summand(self, dim: Dim, parts: Sequence[Tensor], constant: Sequence[bool]) -> Tensor | None:
        return binary(self.fn, *parts) if self.distributes(constant) else None

    def distributes(self, constant: Sequence[bool]) -> bool:
        factor = {"mul": constant.count(False) == 1, "div": constant[1] and not constant[0]}
        return self.linear or factor.get(self.fn, False)


def _product_gradient(dy: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """dy * b summed to a's dimensions: one contraction instead of a product and a sum."""
    if set(dy.shape.names) == set(a.shape.names):
        return binary("mul", dy, b)
    return dy.graph.apply(Einsum(a.shape), dy, b)


def _pow_gradient(dy: Tensor, x: Tensor, y: Tensor, out: Tensor, to: Any) -> Sequence[Tensor | None]:
    # 0 has the power 0 too, and its slope there is 0, not 0 times infinity; so has its logarithm beside it.
    less = where(binary("eq", y, 0.0), 0.0, shift(y, -1.0))
    base = where(binary("eq", x, 0.0), 1.0, x)
    return (
        to(binary("mul", dy, binary("mul", y, binary("pow", x, less))), x.shape),
        to(binary("mul", dy, binary("mul", out, unary("log", base))), y.shape),
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
class Where(Elementwise):
    """Takes x where the condition holds, else y; broadcast by name."""

    def infer(self, *inputs: TensorType) -> TensorType:
        condition, x, y = inputs
        if condition.dtype != "bool":
            raise UserError(
                f"where of {listing(inputs)}: the condition must be bool; compare or cast it first"
            )
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


def binary(fn: str, x: Tensor | float, y: Tensor | float) -> Tensor:
    """Element-wise `fn`; a number becomes a constant of the other operand's dtype."""
    x, y = _plain(x), _plain(y)
    if isinstance(x, int | float):
        if isinstance(y, int | float):
            raise UserError(f"{fn} of {x} and {y}: at least one operand must be a tensor, found two numbers")
        if fn in ("add", "mul"):
            return shift(y, x) if fn == "add" else scale(y, x)
        x = constant_like(y, x, fn)
    elif isinstance(y, int | float):
        if fn == "add" or fn == "sub":
            return shift(x, y if fn == "add" else -y)
        if fn == "mul":
            return scale(x, y)
        most = 6e4 if x.dtype == "float16" else 1e37
        # Beyond that, the reciprocal may be none of the dtype's numbers.
        if fn == "div" and is_float(x.dtype) and 1 / most <= abs(y) <= most:
            return scale(x, 1.0 / y)
        y = constant_like(x, y, fn)
    graph = x.graph if hasattr(x, "graph") else y.graph
    return graph.apply(Binary(fn), x, y)


def _plain(x: Any) -> Any:
    """Python's number for NumPy's scalar."""
    return x.item() if isinstance(x, Real) and hasattr(x, "item") else x


def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    """x if the condition holds, else y, element by element; at least one of x and y is a tensor."""
    if isinstance(x, int | float):
        if isinstance(y, int | float):
            raise UserError("where: x or y must be a tensor, found two numbers")
        x = constant_like(y, x, "where")
    elif isinstance(y, int | float):
        y = constant_like(x, y, "where")
    return condition.graph.apply(Where(), condition, x, y)
