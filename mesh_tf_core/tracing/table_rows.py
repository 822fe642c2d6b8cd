"""A schedule's table in the loop over ticks: the work of each stage in a slot of a tick, and the state
between ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mesh_tf_core.ir.blocks import ARRIVING, IN_FLIGHT, MICROBATCH, Block
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.schedules import KINDS, PipelineSchedule
from mesh_tf_core.ir.stage_orders import IDLE, Interleaved, StageAction
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.index import dynamic_slice, dynamic_update
from mesh_tf_core.ops.math import logical_and, maximum
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.stages import ARRIVALS, CHUNK, RINGS, LayerNumbers, Passing, ScheduleColumn
from mesh_tf_core.tracing.graph import Graph

PLACES = {begin: name for name, begin in RINGS.items()}
"""Slots that store values in rings -> the column of the positions."""


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
            yield StageSlot(self, kind, stages)
        self.new.close_loop(stages, [])

    def come(self, kind: StageAction, held: Sequence[Tensor]) -> list[Tensor]:
        """The values that stages have from others for a slot, of those that `moved` has made."""
        if KINDS[self.schedule.kind].one_way:
            return [*held]
        with self.slot(kind) as slot:
            place = slot.column(ARRIVALS[2])
            return slot.handed([dynamic_slice(x, place, ARRIVING) for x in slot.parts(held)])

    def moved(self, kind: StageAction, handed: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
        """The values that stages hand on, at the next one; where stages hand on to both sides, in the rings
        `held`, since the next one may take them later."""
        of = self.schedule
        if KINDS[of.kind].one_way:
            to = -1 if kind is StageAction.BACKWARD else 1
            return [shift(x, to, self.stage, of.rounds > 1) for x in handed]
        ways = [(shift(x, 1, self.stage), shift(x, -1, self.stage), x) for x in handed]
        with self.slot(kind) as slot:
            last, made = self.new.number(slot.stages) > of.stages - 2, list[Tensor]()
            places = [slot.column(way) for way in ARRIVALS[:2]]
            for ring, moved in zip(slot.parts(held), ways, strict=True):
                before, behind, own = slot.parts(moved)
                for x, place in zip((before, where(last, own, behind)), places, strict=True):
                    ring = dynamic_update(ring, x, place, ARRIVING)
                made.append(ring)
            return slot.handed(made)

    def left(self, kind: StageAction, handed: Sequence[Tensor], stream: int) -> list[Tensor]:
        """The values that left the last stage of a stream forward, or the first backward, on all devices."""
        with self.slot(kind) as slot:
            there = slot.is_end(kind is StageAction.FORWARD, stream, None)
            return [self.new.sum_output(slot.stages, where(there, x, 0)) for x in slot.parts(handed)]

    def tick(self, op: Op) -> Tensor:
        """This tick's part of a column, in the block of the loop over ticks, whatever is being built inside
        of it."""
        with self.new.at_root():
            column = self.new.apply(op)
        return self.new.slice_into(self.block, column)

    def microbatch(self, slot: StageAction, end: bool, stream: int, places: int = 0) -> Tensor:
        """This tick's number of `Passing`."""
        dim, start = self.block.dim, self.ticks.start
        return self.tick(Passing(self.schedule, slot, end, dim, start, places, stream))

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


@dataclass
class StageSlot:
    """The slots of one kind in a tick, while the work of the stages is built, which is done side by side.

    Attributes:
      rows: of the schedule's table; `stages`: the body of the loop over stages.
    """

    rows: TableRows
    kind: StageAction
    stages: Block
    known: dict[str, Tensor] = field(default_factory=dict)

    def column(self, name: str) -> Tensor:
        """This tick's number of a stage in a column of `ScheduleColumn`."""
        rows = self.rows
        if name not in self.known:
            dim, start = rows.block.dim, rows.ticks.start
            column = rows.tick(ScheduleColumn(rows.schedule, self.kind, name, dim, rows.stage, start))
            self.known[name] = rows.new.slice_into(self.stages, column)
        return self.known[name]

    @cached_property
    def works(self) -> Tensor:
        """True if the slot has work; otherwise its other numbers are unused."""
        return self.column(MICROBATCH) > IDLE

    @cached_property
    def number(self) -> Tensor:
        """The number of the microbatch."""
        return maximum(self.column(MICROBATCH), 0)

    @cached_property
    def chunk(self) -> Tensor | None:
        """The virtual stage of the stage; None: it has one."""
        return maximum(self.column(CHUNK), 0) if self.rows.schedule.chunks > 1 else None

    def parts(self, xs: Iterable[Tensor]) -> list[Tensor]:
        """A stage's parts of values of all stages."""
        return [self.rows.new.slice_into(self.stages, x) for x in xs]

    def handed(self, xs: Iterable[Tensor]) -> list[Tensor]:
        """Values of a stage, of all stages."""
        return [self.rows.new.stack_output(self.stages, x) for x in xs]

    def taken(self, rings: Iterable[Tensor], begin: StageAction) -> list[Tensor]:
        """The values of a microbatch in rings that slots of a kind write."""
        return [dynamic_slice(ring, self.column(PLACES[begin]), IN_FLIGHT) for ring in self.parts(rings)]

    def put(self, rings: Iterable[Tensor], xs: Iterable[Tensor]) -> list[Tensor]:
        """The rings that slots of this kind write, with the values of a microbatch."""
        pairs, place = zip(self.parts(rings), xs, strict=True), PLACES[self.kind]
        return self.handed([dynamic_update(ring, x, self.column(place), IN_FLIGHT) for ring, x in pairs])

    def is_end(self, end: bool, stream: int, chunk: Tensor | None) -> Tensor:
        """True at the first virtual stage of a stream, or at the last one at the `end`; without a chunk, at
        its stage."""
        of, stage = self.rows.schedule, self.rows.new.number(self.stages)
        last, number = of.end(end, stream)
        there = stage > of.stages - 2 if last else stage < 1
        if chunk is None:
            return there
        return logical_and(there, chunk > of.chunks - 2 if number else chunk < 1)


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
    """The tensors that slots of one kind hand on to later ticks.

    Attributes:
      flow: states of stages, on their way to the next one.
      rings: values that later slots of the stage read.
      seeds: gradients of losses that wait for backward.
    """

    flow: list[Tensor]
    rings: list[Tensor]
    seeds: list[Tensor]


TickState = Mapping[StageAction, SlotState]
"""The state that one loop over ticks hands to the next, by the slots that write it; others only read it."""


def carried(state: TickState, slots: Iterable[StageAction]) -> list[Tensor]:
    """The tensors that slots of some kinds write."""
    return [x for slot in slots for part in state[slot] for x in part]


def replaced(state: TickState, slots: Iterable[StageAction], found: Iterable[Tensor]) -> TickState:
    """The state with other tensors for those that slots of some kinds write."""
    left, other = iter(found), dict(state)
    for slot in slots:
        other[slot] = SlotState(*([next(left) for _ in part] for part in state[slot]))
    return other
