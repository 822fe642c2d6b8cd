"""Operations of lowering for loops whose iterations run at the same time on different devices
(`Block.spread`): they move values in and out. Pieces stay on their devices; only their names change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.index import Range
from mesh_tf_core.ops.kinds import MadeByLowering, Move
from mesh_tf_core.ops.shape import Concat


@dataclass(frozen=True)
class CalledOtherwise(MadeByLowering, Move, abstract=True):
    """The same elements under another name: nothing moves, no work."""

    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    regroups: ClassVar[bool] = True

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.reshape(slices[0], at.outputs[0].shape.sizes)


@dataclass(frozen=True)
class StageNumbers(Range):
    """The number of a device's stage, which every device knows."""

    free: ClassVar[bool] = True


@dataclass(frozen=True)
class StagePart(CalledOtherwise):
    """A stack [dim, rest], of which every device holds its iteration's part, as this part [rest], or, for
    several elements, [part, rest]."""

    dim: str
    part: Dim | None

    def infer(self, *inputs: TensorType) -> TensorType:
        rest = inputs[0].shape.without(self.dim)
        return TensorType(Shape([self.part, *rest]) if self.part else rest, inputs[0].dtype)


@dataclass(frozen=True)
class StageStack(CalledOtherwise):
    """The inverse: parts [rest], or of `several` elements [part, rest], as the stack [dim, rest]."""

    dim: Dim
    several: bool

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape([self.dim, *inputs[0].shape.dims[self.several :]]), inputs[0].dtype)


@dataclass(frozen=True)
class JoinedParts(MadeByLowering, Concat):
    """One stack of what loops over parts of a dimension stack: each wrote its elements of it."""

    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    joins: ClassVar[bool] = True


@dataclass(frozen=True)
class PartsInPlace(MadeByLowering, AddN):
    """The same of stacks as long as the whole, in which each loop wrote its own elements, among zeros."""

    free: ClassVar[bool] = True
    joins: ClassVar[bool] = True


@dataclass(frozen=True)
class StageTerm(CalledOtherwise):
    """Each stage's term of a sum over all of them."""

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return slices[0]
