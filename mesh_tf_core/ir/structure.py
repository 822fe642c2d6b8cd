"""Operations that connect a graph to the world: fed inputs, variables, loops. They are lowered by `lower`
itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.initializers import Initializer
from mesh_tf_core.ir.op import Op, TensorType


@dataclass(frozen=True)
class Variable:
    """A named tensor that outlives a step.

    Attributes:
      stacked: how many leading dimensions count layers (a scan made them).
      slot_of: for an optimizer's state, the name of the variable that it belongs to.
    """

    name: str
    shape: Shape
    dtype: str
    initializer: Initializer = field(compare=False)
    trainable: bool = True
    stacked: int = 0
    slot_of: str | None = None

    @property
    def bytes(self) -> int:
        return self.shape.size * itemsize(self.dtype)

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)


@dataclass(frozen=True)
class Feed(Op, abstract=True):
    """A tensor of the batch."""

    feed: str
    type: TensorType
    kind: ClassVar[str] = "data"

    def infer(self, *inputs: TensorType) -> TensorType:
        return self.type


@dataclass(frozen=True)
class Read(Op, abstract=True):
    """A variable's value."""

    variable: Variable
    kind: ClassVar[str] = "data"

    def infer(self, *inputs: TensorType) -> TensorType:
        return self.variable.type


@dataclass(frozen=True)
class Assign(Op, abstract=True):
    """Stores a value into a variable."""

    variable: Variable
    kind: ClassVar[str] = "data"


@dataclass(frozen=True)
class Scan(Op, abstract=True):
    """A loop over a stacked dimension; the node's body says what it does."""

    dim: Dim
    kind: ClassVar[str] = "data"
