"""Operations that connect a graph to the world: fed inputs, variables, loops. They are lowered by `lower`
itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.op import Op, TensorType


@dataclass(frozen=True)
class Connection(Op, abstract=True):
    """Connects a graph to the world, or to the body of a loop: nothing is computed. It has no methods but its
    type, and lowering handles each."""

    kind: ClassVar[str] = "data"


@dataclass(frozen=True)
class Feed(Connection, abstract=True):
    """A tensor of the batch."""

    feed: str
    type: TensorType

    def infer(self, *inputs: TensorType) -> TensorType:
        return self.type


@dataclass(frozen=True)
class Read(Connection, abstract=True):
    """A variable's value."""

    variable: Variable

    def infer(self, *inputs: TensorType) -> TensorType:
        return self.variable.lying


@dataclass(frozen=True)
class Assign(Connection, abstract=True):
    """Stores a value into a variable."""

    variable: Variable


@dataclass(frozen=True)
class Scan(Connection, abstract=True):
    """A loop over a stacked dimension; the node's body defines an iteration."""

    dim: Dim


@dataclass(frozen=True)
class KnownTensor(Connection, abstract=True):
    """A tensor that is there, under another name; with `loads`, on the device, if it lay on its host."""

    free: ClassVar[bool] = True
    loads: bool = False
