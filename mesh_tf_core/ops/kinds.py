"""Defaults of operations by kind, so that each class states only its own facets.

  Elementwise     every dimension may be split, the result has the first operand's type; one FLOP an element
  Move            elements only change their place or name: no FLOPs, every dimension may be split
  SourceOp          no operands: a device makes its own piece of the result
  Reduction       elements are combined: one FLOP an element of the operand
  AlongWhole      one dimension is needed whole, every other one may be split
  NoGradient      nothing is differentiated
  FirstDerivative has no derivative itself
  MadeByLowering  lowering makes it after gradients are built, so it has none

A class may be of two kinds (a move that only lowering makes), and may answer any facet itself.

And what operations share besides: alignment by name, checks, roles of element-wise work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape, union
from mesh_tf_core.ir.dtypes import is_float, promote, whole_numbers
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor


def listing(inputs: Sequence[TensorType]) -> str:
    """The operands in words, for errors."""
    return ", ".join(map(str, inputs))


def joined(op: str, inputs: Sequence[TensorType]) -> Shape:
    """Dimensions of a broadcast by name: those of the largest operand first."""
    try:
        return union(*sorted((t.shape for t in inputs), key=len, reverse=True))
    except UserError as e:
        raise UserError(f"{op}: {e}") from None


def same_dtype(op: str, inputs: Sequence[TensorType]) -> str:
    """The operands' dtype; a UserError that lists them if they differ."""
    dtype = inputs[0].dtype
    for t in inputs[1:]:
        try:
            promote(dtype, t.dtype)
        except UserError as e:
            raise UserError(f"{op} of {listing(inputs)}: {e}") from None
    return dtype


def dim_name(dim: Dim | str) -> str:
    """The name of a dimension that is given by itself or by name."""
    return dim.name if isinstance(dim, Dim) else dim


def all_parallel(*inputs: TensorType) -> Roles:
    """Every dimension may be split: element-wise work."""
    return Roles(parallel=tuple(dict.fromkeys(n for t in inputs for n in t.shape.names)))


def align(k: Kernel, x: Any, names: Sequence[str], output: Sequence[str], sizes: Sequence[int]) -> Any:
    """Makes `x`, whose axes are `names`, broadcast against axes `output` (NumPy rules); sizes are x's own."""
    if tuple(names) == tuple(output[len(output) - len(names) :]):
        return x
    order = sorted(range(len(names)), key=lambda i: output.index(names[i]))
    if order != list(range(len(names))):
        x = k.transpose(x, order)
    kept = {names[i]: sizes[i] for i in order}
    shape = [kept.get(n, 1) for n in output]
    while len(shape) > len(names) and shape[0] == 1 and output[len(output) - len(shape)] not in kept:
        shape.pop(0)
    return k.reshape(x, shape)


def aligned(k: Kernel, at: At, slices: Sequence[Any]) -> list[Any]:
    """All slices of an operation aligned to its first output."""
    output = at.outputs[0].shape.names
    return [align(k, x, t.shape.names, output, t.shape.sizes) for x, t in zip(slices, at.inputs, strict=True)]


def check_number(op: str, value: float, dtype: str) -> None:
    """UserError if a dtype cannot represent a number: a fraction beside integers is never truncated."""
    if is_float(dtype):
        return
    low, high = whole_numbers(dtype)
    if value != value or value in (math.inf, -math.inf) or value != int(value):
        raise UserError(
            f"{op} of {dtype} and {value}: {dtype} cannot represent {value}; cast the tensor first, e.g. "
            "with .cast('float32')"
        )
    if not low <= value <= high:
        raise UserError(
            f"{op} of {dtype} and {value:.0f}: {dtype} represents only {low} to {high}; cast the tensor "
            "first, e.g. with .cast('float32')"
        )


def need_fractions(op: str, x: TensorType, instead: str = "") -> None:
    """UserError unless a tensor is of a dtype with fractions."""
    if not is_float(x.dtype):
        other = f", or use {instead}" if instead else ""
        raise UserError(
            f"{op} of {x}: the result is fractional, which {x.dtype} cannot represent; cast the tensor "
            f"first, e.g. with .cast('float32'){other}"
        )


def dtype_name(x: Any) -> str:
    """The dtype of a library's array."""
    return getattr(x.dtype, "name", None) or str(x.dtype)


@dataclass(frozen=True)
class _ByElement(Op, abstract=True):
    """Work in proportion to the elements of the first operand, along which every dimension may be split."""

    element_flops: ClassVar[float] = 1.0
    """FLOPs for an element."""

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def flops(self, *local: TensorType) -> float:
        return self.element_flops * local[0].shape.size


@dataclass(frozen=True)
class Elementwise(_ByElement, abstract=True):
    """Each element of the result depends on the same element of every operand."""

    def infer(self, *inputs: TensorType) -> TensorType | tuple[TensorType, ...]:
        return inputs[0]


@dataclass(frozen=True)
class Move(Elementwise, abstract=True):
    """Elements are copied or called otherwise, never computed with."""

    kind: ClassVar[str] = "data"
    element_flops: ClassVar[float] = 0.0


@dataclass(frozen=True)
class Reduction(_ByElement, abstract=True):
    """Elements of the operand are combined, each once."""

    kind: ClassVar[str] = "reduce"


@dataclass(frozen=True)
class AlongWhole(Op, abstract=True):
    """Every result needs all elements along one dimension, or along each of several.

    Attributes:
      dim: its name, or their names.
      why: it does, as errors and reports say it.
    """

    dim: Any
    why: ClassVar[str]

    def roles(self, *inputs: TensorType) -> Roles:
        own = (self.dim,) if isinstance(self.dim, str) else self.dim
        others = tuple(name for name in all_parallel(*inputs).parallel if name not in own)
        return Roles(parallel=others, whole=dict.fromkeys(own, self.why))


@dataclass(frozen=True)
class NoGradient(Op, abstract=True):
    """Nothing is differentiated."""

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return [None] * len(inputs)


@dataclass(frozen=True)
class FirstDerivative(Op, abstract=True):
    """A gradient that is one operation, which cannot be differentiated again."""

    @property
    def of(self) -> str:
        """The operation that it differentiates, as errors call it."""
        return self.name.removesuffix("grad").removesuffix("_")

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        raise UserError(
            f"the second derivative of {self.of} is not defined; apply mtf.stop_gradient to the first "
            "derivative"
        )


@dataclass(frozen=True)
class SourceOp(NoGradient, abstract=True):
    """Makes a tensor of nothing but its own fields."""

    kind: ClassVar[str] = "data"

    def roles(self, *inputs: TensorType) -> Roles:
        made = self.infer()
        assert isinstance(made, TensorType)
        return Roles(parallel=made.shape.names)

    def flops(self, *local: TensorType) -> float:
        return 0.0


@dataclass(frozen=True)
class MadeByLowering(Op, abstract=True):
    """Occurs only in programs: gradients are built before a graph is lowered."""

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        raise UserError(
            f"operation {self.name} exists only in lowered programs and has no gradient; take gradients "
            "before lowering"
        )
