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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.common import all_parallel


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
