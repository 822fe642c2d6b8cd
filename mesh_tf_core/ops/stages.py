"""What lowering makes where a loop's iterations run at once, each on devices of its own (`Block.spread`):
how values come in and go out. Pieces stay where they are; they are only called otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.common import all_parallel
from mesh_tf_core.ops.index import Range


@dataclass(frozen=True)
class CalledOtherwise(Op, abstract=True):
    """What moves nothing and takes no work.

    Attributes:
      done: what lowering does by it, in words.
    """

    kind: ClassVar[str] = "data"
    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    regroups: ClassVar[bool] = True
    done: ClassVar[str]

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(*inputs)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.reshape(slices[0], at.outputs[0].shape.sizes)

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        raise UserError(f"{self.done} by lowering and have no gradient of their own")


@dataclass(frozen=True)
class StageNumbers(Range):
    """The numbers of the stages, of which every device has its own: it knows it."""

    free: ClassVar[bool] = True


@dataclass(frozen=True)
class StagePart(CalledOtherwise):
    """A stack [dim, rest], of which every device holds its iteration's part, as this part [rest], or, of
    several elements, [part, rest]."""

    dim: str
    part: Dim | None
    done: ClassVar[str] = "stages' parts are taken"

    def infer(self, *inputs: TensorType) -> TensorType:
        rest = inputs[0].shape.without(self.dim)
        return TensorType(Shape([self.part, *rest]) if self.part else rest, inputs[0].dtype)


@dataclass(frozen=True)
class StageStack(CalledOtherwise):
    """The inverse: parts [rest], or of `several` elements [part, rest], as the stack [dim, rest]."""

    dim: Dim
    several: bool
    done: ClassVar[str] = "stages' parts are stacked"

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape([self.dim, *inputs[0].shape.dims[self.several :]]), inputs[0].dtype)


@dataclass(frozen=True)
class StageTerm(CalledOtherwise):
    """Each stage's term of a sum over all of them."""

    done: ClassVar[str] = "stages' terms are added"

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return slices[0]
