"""Operations of lowering for loops whose iterations run at the same time on different devices
(`Block.spread`): they move values in and out. Pieces stay on their devices; only their names change.

Others are for microbatches at ticks: they read the schedule's table (`ir.schedules`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mesh_tf_core.ir.blocks import TICK
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.schedules import PipelineSchedule
from mesh_tf_core.ir.stage_orders import IDLE, Interleaved, StageAction
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.index import Range
from mesh_tf_core.ops.kinds import MadeByLowering, Move, SourceOp
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


WHY = "microbatches are processed one after another"
CHUNK = "chunk"
"""The column of a slot, beside its microbatch, with the number of the virtual stage."""
RINGS = {f"{slot.name.lower()} ring": slot for slot in (StageAction.FORWARD, StageAction.BACKWARD)}
"""The columns with positions in a ring, and the slots that write there."""
ARRIVALS = ("from before", "from behind", "taken")
"""The columns of what stages hand on (`PipelineSchedule.arrivals`)."""


@dataclass(frozen=True)
class ScheduleColumn(SourceOp):
    """A column of a schedule's table for a loop over ticks, as [tick, stage].

    Attributes:
      slot, column: which column of which slot.
      tick, stage: dimensions of the result.
      begin: the loop's first tick.
    """

    schedule: PipelineSchedule
    slot: StageAction
    column: str
    tick: Dim
    stage: Dim
    begin: int = 0

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=(self.stage.name,), whole={TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape([self.tick, self.stage]), "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        rows = slice(self.begin, self.begin + self.tick.size)
        if self.column in RINGS:
            numbers = self.schedule.places[RINGS[self.column]][rows, :, self.slot]
        elif self.column in ARRIVALS:
            numbers = self.schedule.arrivals[self.slot][rows, :, ARRIVALS.index(self.column)]
        else:
            numbers = self.schedule.table[rows, :, self.slot, int(self.column == CHUNK)]
        return _of_stages(k, at, numbers, self.stage)


@dataclass(frozen=True)
class Passing(SourceOp):
    """The microbatch of a stream that is at the first virtual stage, or at the last one at the `end`, at each
    of a loop's ticks, as [tick]; IDLE where none is. With `places`, its position in a ring of so many."""

    schedule: PipelineSchedule
    slot: StageAction
    end: bool
    tick: Dim
    begin: int = 0
    places: int = 0
    stream: int = 0

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(whole={TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape([self.tick]), "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        found = self.schedule.passing(self.slot, self.end, self.stream)[self.begin :][: self.tick.size]
        if self.places:
            found = np.where(found == IDLE, IDLE, found // self.schedule.streams % self.places)
        return k.array(found, "int32")


@dataclass(frozen=True)
class LayerNumbers(SourceOp):
    """The model's numbers of the layers that stages have, as [stage, place]; PADDING where one lacks a layer.

    Attributes:
      layers: number of layers of the model.
      stage, place: dimensions of the result.
    """

    order: Interleaved
    layers: int
    stage: Dim
    place: Dim

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=(self.stage.name,), whole={self.place.name: "a stage holds all of its layers"})

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape([self.stage, self.place]), "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return _of_stages(k, at, self.order.numbers(self.layers), self.stage)


def _of_stages(k: Kernel, at: At, numbers: np.ndarray, stage: Dim) -> Any:
    """A table as an array, of the stages that a device has."""
    x, shape = k.array(np.ascontiguousarray(numbers), "int32"), at.outputs[0].shape
    if stage.name not in at.split:
        return x
    return k.slice(x, [at.offset(d.name) if d.name == stage.name else 0 for d in shape], shape.sizes)
