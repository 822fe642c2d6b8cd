"""The simplest element-wise operations: linear maps, casts, constants, stop-gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import FLOAT8, check_dtype, is_float
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.kinds import (
    Elementwise,
    Move,
    NoGradient,
    SourceOp,
    aligned,
    check_number,
    listing,
    same_dtype,
)


@dataclass(frozen=True)
class AddN(Elementwise):
    """Adds operands of equal dimensions (the sum of a tensor's gradients)."""

    linear: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        dtype = same_dtype("add_n", inputs)
        if any(set(t.shape.dims) != set(inputs[0].shape.dims) for t in inputs):
            raise UserError(f"add_n of {listing(inputs)}: all operands must have the same dimensions")
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
class Total(AddN):
    """Adds scalars. Where they are pending sums in an update, over whatever axes, their sum is taken once for
    all (`lower.sums`).

    Attributes:
      shares: for each operand, the number of devices that hold the same shard of it; each counts its share.
        () if every operand is whole.
    """

    shares: tuple[int, ...] = ()
    linear: ClassVar[bool] = False

    def infer(self, *inputs: TensorType) -> TensorType:
        if any(t.shape for t in inputs):
            raise UserError(f"total of {listing(inputs)}: all operands must be scalars")
        return super().infer(*inputs)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        dtype, shares = at.outputs[0].dtype, self.shares or (1,) * len(slices)
        parts = [
            x if n == 1 else k.binary("mul", x, k.scalar(1 / n, dtype))
            for x, n in zip(slices, shares, strict=True)
        ]
        return super().kernel(k, at, *parts)


@dataclass(frozen=True)
class Scale(Elementwise):
    """Multiplies by a constant."""

    factor: float
    linear: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        check_number("mul", self.factor, inputs[0].dtype)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.binary("mul", slices[0], k.scalar(self.factor, at.outputs[0].dtype))

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (scale(dy, self.factor),)


@dataclass(frozen=True)
class Shift(Elementwise):
    """Adds a constant."""

    offset: float

    def infer(self, *inputs: TensorType) -> TensorType:
        check_number("add", self.offset, inputs[0].dtype)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.binary("add", slices[0], k.scalar(self.offset, at.outputs[0].dtype))

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy,)

    def summand(self, dim: Dim, parts: Sequence[Tensor], constant: Sequence[bool]) -> Tensor | None:
        return shift(parts[0], self.offset / dim.size)


@dataclass(frozen=True)
class Cast(Elementwise):
    """Changes the element type. `bool` and integers have no gradient."""

    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)

    @property
    def converts(self) -> bool:  # type: ignore[override]
        """A truth value is not a number."""
        return self.dtype != "bool"

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.cast(slices[0], self.dtype)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (cast(dy, inputs[0].dtype) if is_float(inputs[0].dtype) else None,)


@dataclass(frozen=True)
class Constant(SourceOp):
    """A scalar of one value."""

    value: float
    dtype: str
    free: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        if self.dtype not in FLOAT8:  # loops begin stacks of factors with zeros
            check_dtype(self.dtype)
        check_number("constant", self.value, self.dtype)
        return TensorType(Shape(), self.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.full((), self.value, self.dtype)


@dataclass(frozen=True)
class StopGradient(NoGradient, Move):
    """The identity, through which no gradient flows."""

    linear: ClassVar[bool] = True
    free: ClassVar[bool] = True
    converts: ClassVar[bool] = True

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return slices[0]


def add_n(xs: Sequence[Tensor]) -> Tensor:
    """Sum of tensors of equal dimensions; one tensor is returned as it is."""
    return xs[0] if len(xs) == 1 else xs[0].graph.apply(AddN(), *xs)


def total(xs: Sequence[Tensor]) -> Tensor:
    """Sum of scalars, in one message where they are sums over devices."""
    return xs[0] if len(xs) == 1 else xs[0].graph.apply(Total(), *xs)


def scale(x: Tensor, factor: float) -> Tensor:
    """x times a number."""
    return x if factor == 1 else x.graph.apply(Scale(factor), x)


def shift(x: Tensor, offset: float) -> Tensor:
    """x plus a number."""
    return x if offset == 0 else x.graph.apply(Shift(offset), x)


def cast(x: Tensor, dtype: str) -> Tensor:
    """Converts x to another element type."""
    return x if x.dtype == dtype else x.graph.apply(Cast(dtype), x)


def constant_like(x: Tensor, value: float, op: str = "constant") -> Tensor:
    """A scalar in x's graph and dtype; UserError, in the name of `op`, if the dtype has no such number."""
    check_number(op, value, x.dtype)
    return x.graph.apply(Constant(value, x.dtype))


def stop_gradient(x: Tensor) -> Tensor:
    """Returns x without a gradient."""
    return x.graph.apply(StopGradient(), x)
