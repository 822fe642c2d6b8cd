"""A schedule's table in the loop over ticks: the work of each stage in a slot of a tick, and the state
between ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mesh_tf_core.ir.blocks import ARRIVING, IN_FLIGHT, MICROBATCH, Block
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.schedules import KINDS, PipelineSchedule
from mesh_tf_core.ir.stage_orders import IDLE, StageAction
from mesh_tf_core.ir.stored_order import Interleaved
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.dynamic import dynamic_slice, dynamic_update
from mesh_tf_core.ops.math import logical_and, maximum
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.ticks import ARRIVALS, CHUNK, RINGS, LayerNumbers, Passing, ScheduleColumn
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class TableRows:
    """The rows of a schedule's table for one loop over ticks.

    Attributes:
      stage: dimension of the stages.
      ticks: of the schedule, that the loop runs over.
      block: the loop's body.
    """

    new: Graph
    schedule: PipelineSchedule
    stage: Dim
    ticks: range
    block: Block

    @contextmanager
    def slot(self, kind: StageAction) -> Iterator[StageSlot]:
        """A slot of all stages; what is built inside is the work of one."""
        with self.new.loop(self.stage, spread=True) as stages:
            item = self.column(kind, MICROBATCH, stages)
            chunk = maximum(self.column(kind, CHUNK, stages), 0) if self.schedule.chunks > 1 else None
            yield StageSlot(self, kind, stages, item > IDLE, maximum(item, 0), chunk)
        self.new.close_loop(stages, [])

    def column(self, slot: StageAction, name: str, stages: Block) -> Tensor:
        """This tick's number of a stage in a column of `ScheduleColumn`."""
        with self.new.at_root():
            column = self.new.apply(
                ScheduleColumn(self.schedule, slot, name, self.block.dim, self.stage, self.ticks.start)
            )
        return self.new.slice_into(stages, self._part(column))

    def is_end(self, stage: Tensor, chunk: Tensor | None, end: bool, stream: int) -> Tensor:
        """True at the first virtual stage of a stream, or at the last one at the `end`; without a chunk, at
        its stage."""
        last, number = self.schedule.end(end, stream)
        there = stage > self.schedule.stages - 2 if last else stage < 1
        if chunk is None:
            return there
        return logical_and(there, chunk > self.schedule.chunks - 2 if number else chunk < 1)

    def come(self, slot: StageAction, held: Sequence[Tensor]) -> list[Tensor]:
        """The values that stages have from others for a slot, of those that `moved` has made."""
        if KINDS[self.schedule.kind].one_way:
            return [*held]
        with self.new.loop(self.stage, spread=True) as stages:
            place = self.column(slot, ARRIVALS[2], stages)
            taken = [dynamic_slice(self.new.slice_into(stages, h), place, ARRIVING) for h in held]
            found = [self.new.stack_output(stages, x) for x in taken]
        self.new.close_loop(stages, [])
        return found

    def moved(self, slot: StageAction, handed: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
        """The values that stages hand on, at the next one; where stages hand on to both sides, in the rings
        `held`, since the next one may take them later."""
        new, of = self.new, self.schedule
        if KINDS[of.kind].one_way:
            to = -1 if slot is StageAction.BACKWARD else 1
            return [shift(x, to, self.stage, of.rounds > 1) for x in handed]
        ways = [(shift(x, 1, self.stage), shift(x, -1, self.stage), x) for x in handed]
        with new.loop(self.stage, spread=True) as stages:
            last, made = new.number(stages) > of.stages - 2, list[Tensor]()
            places = [self.column(slot, way, stages) for way in ARRIVALS[:2]]
            for ring, moved in zip(held, ways, strict=True):
                before, behind, own = (new.slice_into(stages, x) for x in moved)
                found = new.slice_into(stages, ring)
                for x, place in zip((before, where(last, own, behind)), places, strict=True):
                    found = dynamic_update(found, x, place, ARRIVING)
                made.append(new.stack_output(stages, found))
        new.close_loop(stages, [])
        return made

    def _part(self, column: Tensor) -> Tensor:
        """This tick's part, in the block of the loop over ticks, whatever is being built inside of it."""
        return self.new.slice_into(self.block, column)

    def microbatch(self, slot: StageAction, end: bool, stream: int, places: int = 0) -> Tensor:
        """This tick's number of `Passing`."""
        op = Passing(self.schedule, slot, end, self.block.dim, self.ticks.start, places, stream)
        with self.new.at_root():
            column = self.new.apply(op)
        return self._part(column)

    def passing(
        self, slot: StageAction, end: bool, stream: int, make: Callable[[Tensor], Sequence[Tensor]]
    ) -> list[Tensor] | None:
        """The values made of the microbatch of a stream that is at the first virtual stage, or at the last
        one at the `end`; with several virtual stages a stage, in the ticks in which one is, and zeros in
        others. None if none ever is.

        Args:
          make: of the number of a microbatch.
        """
        new, of = self.new, self.schedule
        item = self.microbatch(slot, end, stream)
        number = maximum(item, 0)
        if of.chunks == 1:
            return [*make(number)]
        found = of.passing(slot, end, stream)[self.ticks.start : self.ticks.stop]
        if not (count := int(np.count_nonzero(found != IDLE))):
            return None
        with new.branch(item > IDLE, Fraction(count, of.works_in(slot, self.ticks))) as block:
            made = [new.sum_output(block, new.visible(x)) for x in make(number)]
        new.close_loop(block, [])
        return made


@dataclass(frozen=True)
class StageSlot:
    """The slots of one kind in a tick, while the work of the stages is built, which is done side by side.

    Attributes:
      rows: of the schedule's table.
      stages: the body of the loop over stages.
      works: True if the slot has work; otherwise the other numbers are unused.
      number: of the microbatch.
      chunk: the virtual stage of the stage; None: it has one.
    """

    rows: TableRows
    kind: StageAction
    stages: Block
    works: Tensor
    number: Tensor
    chunk: Tensor | None
    _places: dict[StageAction, Tensor] = field(default_factory=dict, init=False)

    def part(self, x: Tensor) -> Tensor:
        """A stage's part of a value of all stages."""
        return self.rows.new.slice_into(self.stages, x)

    def parts(self, xs: Iterable[Tensor]) -> list[Tensor]:
        """The same of several."""
        return [*map(self.part, xs)]

    def handed(self, xs: Iterable[Tensor]) -> list[Tensor]:
        """Values of a stage, of all stages."""
        return [self.rows.new.stack_output(self.stages, x) for x in xs]

    def place(self, begin: StageAction) -> Tensor:
        """The position in a ring where a stage stores a value of slots of the kind `begin`, or reads it."""
        if begin not in self._places:
            name = next(name for name, put in RINGS.items() if put is begin)
            self._places[begin] = self.rows.column(self.kind, name, self.stages)
        return self._places[begin]

    def taken(self, rings: Iterable[Tensor], begin: StageAction) -> list[Tensor]:
        """The values of a microbatch in rings that slots of a kind write."""
        return [dynamic_slice(self.part(ring), self.place(begin), IN_FLIGHT) for ring in rings]

    def put(self, rings: Iterable[Tensor], xs: Iterable[Tensor]) -> list[Tensor]:
        """The rings that slots of this kind write, with the values of a microbatch."""
        pairs = zip(self.parts(rings), xs, strict=True)
        return self.handed([dynamic_update(ring, x, self.place(self.kind), IN_FLIGHT) for ring, x in pairs])

    def is_end(self, end: bool, stream: int) -> Tensor:
        """True at the first virtual stage of a stream, or at the last one at the `end`."""
        return self.rows.is_end(self.rows.new.number(self.stages), self.chunk, end, stream)


def layer_numbers(new: Graph, order: Interleaved, layers: Dim, stages: Block, own: Dim) -> Tensor | None:
    """The model's numbers of the layers of the stage that is being built, PADDING where it lacks one; None if
    none does.

    Args:
      layers: number of layers of the model; `own`: of a stage.
    """
    if not order.lacks(layers.size):
        return None
    with new.at_root():
        numbers = new.apply(LayerNumbers(order, layers.size, Dim(layers.name, order.stages), own))
    return new.slice_into(stages, numbers)


class SlotState(NamedTuple):
    """What slots of one kind hand on to later ticks.

    Attributes:
      flow: states of stages, on their way to the next one.
      rings: values that later slots of the stage read.
      seeds: gradients of losses that wait for backward.
    """

    flow: list[Tensor]
    rings: list[Tensor]
    seeds: list[Tensor]

    def of(self, found: Iterator[Tensor]) -> SlotState:
        """The same with other tensors."""
        return SlotState(*([next(found) for _ in part] for part in self))


TickState = Mapping[StageAction, SlotState]
"""The state that one loop over ticks hands to the next, by the slots that write it; others only read it."""


def carried(state: TickState, slots: Iterable[StageAction]) -> list[Tensor]:
    """The tensors that slots of some kinds write."""
    return [x for slot in slots for part in state[slot] for x in part]


def replaced(state: TickState, slots: Iterable[StageAction], found: Iterable[Tensor]) -> TickState:
    """The state with other tensors for those that slots of some kinds write."""
    left = iter(found)
    return {**state, **{slot: state[slot].of(left) for slot in slots}}
