"""Microbatches at ticks: values that enter and leave a pipeline, and reads of the schedule's table.

`ir.schedules` decides which microbatch a stage has at a tick; these operations only read the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, TICK
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.schedules import IDLE, PipelineSchedule, StageAction
from mesh_tf_core.ir.stored_order import Interleaved
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.common import listing
from mesh_tf_core.ops.kinds import Move, Source

WHY = "microbatches are processed one after another"
CHUNK = "chunk"
"""The column of a slot, beside its microbatch, with the number of the virtual stage."""
RINGS = {f"{slot.name.lower()} ring": slot for slot in (StageAction.FORWARD, StageAction.BACKWARD)}
"""The columns with positions in a ring, and the slots that write there."""


def _first(op: str, name: str, inputs: Sequence[TensorType], size: int) -> Shape:
    """The dimensions behind the first; UserError if that is another one."""
    shape = inputs[0].shape
    if not len(shape) or shape.dims[0] != Dim(name, size):
        raise UserError(f"{op} of {listing(inputs)}: the first dimension must be {name}:{size}")
    return shape.without(name)


def _rows(k: Kernel, x: Any, numbers: np.ndarray) -> Any:
    """Rows of x, which lie next to each other in most schedules."""
    if (np.diff(numbers) == 1).all():
        return k.slice(x, [int(numbers[0])] + [0] * (len(x.shape) - 1), (len(numbers), *x.shape[1:]))
    return k.take(x, k.array(numbers, "int32"))


@dataclass(frozen=True)
class ScheduleColumn(Source):
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
            numbers = self.schedule.places(RINGS[self.column])[rows, :, self.slot]
        else:
            numbers = self.schedule.table[rows, :, self.slot, int(self.column == CHUNK)]
        return _of_stages(k, at, numbers, self.stage)


@dataclass(frozen=True)
class Passing(Source):
    """The microbatch that is at the first virtual stage, or at the last one at the `end`, at each of a loop's
    ticks, as [tick]; IDLE where none is."""

    schedule: PipelineSchedule
    slot: StageAction
    end: bool
    tick: Dim
    begin: int = 0

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(whole={TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape([self.tick]), "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.array(self.schedule.passing(self.slot, self.end)[self.begin :][: self.tick.size], "int32")


@dataclass(frozen=True)
class LayerNumbers(Source):
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


def _forward(schedule: PipelineSchedule, end: bool) -> np.ndarray:
    """[tick of a pass forward]: the microbatch that enters, or leaves at the `end`."""
    return schedule.passing(StageAction.FORWARD, end)[: schedule.ticks]


@dataclass(frozen=True)
class ToTicks(Move):
    """x [microbatch, rest] as [tick, rest]: each microbatch at the tick at which it enters the pipeline, or
    leaves it at the `end`. The other ticks have zeros, or, with `fill`, the first microbatch: idle stages
    then compute on ordinary numbers, and no gradient comes back from them."""

    schedule: PipelineSchedule
    end: bool
    fill: bool
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        rest = inputs[0].shape.without(MICROBATCH).names
        return Roles(parallel=rest, whole={MICROBATCH: WHY, TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        rest = _first("to_ticks", MICROBATCH, inputs, self.schedule.microbatches)
        return TensorType(Shape([Dim(TICK, self.schedule.ticks), *rest]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (x,), rest = slices, at.inputs[0].shape.sizes[1:]
        numbers, none = _forward(self.schedule, self.end), [(0, 0)] * len(rest)
        begin, last = np.flatnonzero(numbers != IDLE)[[0, -1]].tolist()
        ends = begin, len(numbers) - 1 - last
        if (numbers[begin : last + 1] == IDLE).any():
            # Some ticks between have none: every tick takes its row, or one put before all for those.
            first = k.slice(x, [0] * (1 + len(rest)), (1, *rest))
            before = first if self.fill else k.full((1, *rest), 0, at.inputs[0].dtype)
            return k.take(k.concat([before, x], 0), k.array(numbers + 1, "int32"))
        if not self.fill:
            return k.pad(x, [ends, *none])
        first = k.slice(x, [0] * (1 + len(rest)), (1, *rest))
        more = [k.broadcast_to(first, (n, *rest)) if n else None for n in ends]
        return k.concat([part for part in (more[0], x, more[1]) if part is not None], 0)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(FromTicks(self.schedule, self.end), dy),)


@dataclass(frozen=True)
class FromTicks(Move):
    """x [tick, rest] as [microbatch, rest]: the values as each microbatch enters, or leaves at the `end`."""

    schedule: PipelineSchedule
    end: bool
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        rest = inputs[0].shape.without(TICK).names
        return Roles(parallel=rest, whole={MICROBATCH: WHY, TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        rest = _first("from_ticks", TICK, inputs, self.schedule.ticks)
        return TensorType(Shape([Dim(MICROBATCH, self.schedule.microbatches), *rest]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        numbers = _forward(self.schedule, self.end)
        (ticks,) = np.nonzero(numbers != IDLE)
        return _rows(k, slices[0], ticks[np.argsort(numbers[ticks])])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(ToTicks(self.schedule, self.end, False), dy),)
