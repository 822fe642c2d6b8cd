"""A schedule's table in the loop over ticks: the work of each stage in a slot of a tick, and the state
between ticks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mesh_tf_core.ir.blocks import MICROBATCH, TICK, Block
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.schedules import IDLE, PipelineSchedule, StageAction
from mesh_tf_core.ir.stored_order import Interleaved
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.math import maximum
from mesh_tf_core.ops.ticks import CHUNK, RINGS, LayerNumbers, Passing, ScheduleColumn
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class SlotWork:
    """The action of a stage in a slot of a tick, all scalars.

    Attributes:
      works: True if the slot has work; otherwise the other numbers are unused.
      number: of the microbatch.
      chunk: the virtual stage of the stage; None: it has one.
    """

    works: Tensor
    number: Tensor
    chunk: Tensor | None


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
    block: Block | None = None

    @property
    def dim(self) -> Dim:
        return Dim(TICK, len(self.ticks))

    def inside(self, block: Block) -> TableRows:
        """The same in the loop's body."""
        return replace(self, block=block)

    @property
    def number(self) -> Tensor:
        """The number of the tick among the loop's."""
        assert self.block is not None and self.block.index is not None
        return self.new.tensors[self.block.index]

    def at(self, slot: StageAction, stages: Block) -> SlotWork:
        """The action, in a slot, of the stage whose part of the tick is being built."""
        item = self._column(slot, MICROBATCH, stages)
        chunk = maximum(self._column(slot, CHUNK, stages), 0) if self.schedule.chunks > 1 else None
        return SlotWork(item > IDLE, maximum(item, 0), chunk)

    def place(self, slot: StageAction, stages: Block, begin: StageAction) -> Tensor:
        """The position in a ring where a stage stores a value of slots of the kind `begin`, or reads it."""
        return self._column(slot, next(name for name, put in RINGS.items() if put is begin), stages)

    def _column(self, slot: StageAction, name: str, stages: Block) -> Tensor:
        assert self.block is not None
        with self.new.at_root():
            column = self.new.apply(
                ScheduleColumn(self.schedule, slot, name, self.dim, self.stage, self.ticks.start)
            )
        return self.new.slice_into(stages, self._part(column))

    def _part(self, column: Tensor) -> Tensor:
        """This tick's part, in the block of the loop over ticks, whatever is being built inside of it."""
        assert self.block is not None
        return self.new.slice_into(self.block, column)

    def passing(
        self, slot: StageAction, end: bool, make: Callable[[Tensor], Sequence[Tensor]]
    ) -> list[Tensor] | None:
        """The values made of the microbatch that is at the first virtual stage, or at the last one at the
        `end`; with several virtual stages a stage, in the ticks in which one is, and zeros in others. None if
        none ever is.

        Args:
          make: of the number of a microbatch.
        """
        new, of = self.new, self.schedule
        with new.at_root():
            column = new.apply(Passing(of, slot, end, self.dim, self.ticks.start))
        item = self._part(column)
        number = maximum(item, 0)
        if of.chunks == 1:
            return [*make(number)]
        found = of.passing(slot, end)[self.ticks.start : self.ticks.stop]
        if not (count := int(np.count_nonzero(found != IDLE))):
            return None
        with new.branch(item > IDLE, Fraction(count, of.works_in(slot, self.ticks))) as block:
            made = [new.sum_output(block, new.visible(x)) for x in make(number)]
        new.close_loop(block, [])
        return made


def layer_numbers(new: Graph, order: Interleaved, layers: Dim, stages: Block, own: Dim) -> Tensor | None:
    """The model's numbers of the layers of the stage that is being built, PADDING where it lacks one; None if
    none does.

    Args:
      layers: number of layers of the model; `own`: of a stage.
    """
    if order.size(layers.size) == layers.size:
        return None
    with new.at_root():
        numbers = new.apply(LayerNumbers(order, layers.size, Dim(layers.name, order.stages), own))
    return new.slice_into(stages, numbers)


class TickState(NamedTuple):
    """The state that one loop over ticks hands to the next.

    Attributes:
      flow, back: states of stages, forward and backward.
      rings: saved values of forward; `late`: values that backward keeps for slots of weights.
    """

    flow: list[Tensor]
    rings: list[Tensor]
    back: list[Tensor]
    late: list[Tensor]

    def taken(self, carries: Sequence[bool]) -> list[Tensor]:
        """The tensors of the parts that are carried."""
        return [x for part, goes in zip(self, carries, strict=True) if goes for x in part]

    def of(self, found: Sequence[Tensor], carries: Sequence[bool]) -> TickState:
        """The same with other tensors for the parts that are carried."""
        left = iter(found)
        parts = (
            [next(left) for _ in part] if goes else part for part, goes in zip(self, carries, strict=True)
        )
        return TickState(*parts)
