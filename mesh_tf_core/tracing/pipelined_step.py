"""Pipelines: a loop over equal layers as stages on different devices, which work on different microbatches at
the same time (Huang et al. 2019, "GPipe"; as one SPMD program: Xu et al. 2021, "GSPMD", section 3.3).

A pipeline is made of the step in microbatches (`tracing.microbatch`), whose loop over them becomes loops over
ticks; all around it stays. In a tick a device runs a slot of each kind that the tick has, of one virtual
stage each, as in the table of the schedule (`ir.schedules`); an idle stage computes on numbers that are not
used. The ticks are split into loops where a kind of slots or the losses begin, so that a gradient is added up
in one loop, in one place in memory: with P stages of R virtual stages, and a pass of T ticks, in 1F1B

  P R - 1 ticks  before the layers of a microbatch, forward
  T ticks        the same, in the first T - (P R - 1); behind the layers, the loss and its gradient of a
                 microbatch; backward

and in GPipe a pass of T ticks forward, the same split, and one of T ticks backward; gradients of losses wait
for it (`PipelineSchedule.turning`). With one virtual stage per stage, microbatches enter and leave at every
tick; with several, at P of P R ticks, and operations before and after the layers run only at these
(`Block.runs`).

Stages keep the values of a virtual stage that backward reads, each in a ring of `PipelineSchedule.in_flight`
places. Or they keep each layer's state and its kept values, and backward recomputes the rest of the layer. Or
they keep only the state at the beginning of the virtual stage, and backward recomputes everything from there
(`virtual_stages.Again`). Operations before the layers are recomputed wherever an operation behind
the layers reads them. The gradients of an idle slot are zero, and it adds nothing.

Variables that layers read by parts are stored so that each device has its virtual stages
(`ir.stored_order`); other readers, and other stacks, are converted from one order to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from mesh_tf_core.ir.blocks import IN_FLIGHT, TICK
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import add_n
from mesh_tf_core.ops.dynamic import dynamic_slice, dynamic_update
from mesh_tf_core.tracing.stage_slots import BACKWARD, FORWARD, WEIGHTS, StageSlots, Terms
from mesh_tf_core.tracing.table_rows import SlotState, TableRows, TickState, carried, replaced

SlotMade = tuple[SlotState, list[Tensor], Terms]
"""The state after a slot, what it hands to the next one, and terms of sums."""
MakeSlot = Callable[[TickState], SlotMade]


class PipelinedStep(StageSlots):
    """A step in microbatches, or its forward operations, as a pipeline over the loop that `dim` counts.

    Raises:
      UserError: the loop cannot be a pipeline; with the reason and the remedy.
    """

    def loops(self) -> dict[int, Tensor]:
        self._keep()
        new, order, of, layers = self.new, self.course, self.schedule, self.parted
        self.made = dict[int, list[Tensor]]()
        ring = Dim(IN_FLIGHT, of.in_flight)
        rings = [self.zeros(i, self.stage, ring) for i in self.in_rings]
        rings += [self.zeros(i, self.stage, ring, part.dim) for part in layers for i in part.keeps.values()]
        flow = [self._flow(FORWARD, i) for i in self.flows]
        state: TickState = {
            FORWARD: SlotState(flow, rings, []),
            **dict.fromkeys((BACKWARD, WEIGHTS), SlotState([], [], [])),
        }
        for ticks in of.loops:
            slots = [slot for slot in StageAction if of.works_in(slot, ticks)]
            slots = [slot for slot in slots if order.seeds or slot is FORWARD]
            if ticks.start and of.turning and not state[FORWARD].seeds:
                turn = Dim(IN_FLIGHT, of.turning)
                seeds = [self.zeros(i, turn) for _ in self.streams for i in order.seeds]
                state = {**state, FORWARD: state[FORWARD]._replace(seeds=seeds)}
            if BACKWARD in slots and not state[BACKWARD].flow:
                back = [self._flow(BACKWARD, i) for i in (*order.seeds, *order.rows)]
                ring = Dim(IN_FLIGHT, of.ring(BACKWARD))
                late = [
                    self.zeros(i, self.stage, ring, part.dim)
                    for part in layers
                    for i in part.between.values()
                ]
                state = {**state, BACKWARD: SlotState(back, late, [])}
            with new.phase(Phase.FORWARD if FORWARD in slots else Phase.BACKWARD, ""):
                state = self._ticks(ticks, slots, state) if slots else state
        with new.phase(Phase.BACKWARD, ""):
            return {o: add_n(xs) for o, xs in self.made.items()}

    def _ticks(self, ticks: range, slots: Sequence[StageAction], state: TickState) -> TickState:
        """A loop over ticks with these slots; the state after it."""
        new, before = self.new, carried(state, slots)
        with new.loop(Dim(TICK, len(ticks))) as block:
            inside = [new.body_input(block, x) for x in before]
            rows = TableRows(new, self.schedule, self.stage, ticks, block)
            now = replaced(state, slots, inside)
            entering, terms = list[Tensor](), Terms()
            if FORWARD in slots:
                make = partial(self._forward_part, rows, rows.ticks.start > 0)
                now, entering, terms = self._in_first_ticks(rows, FORWARD, now, make)
            with new.phase(Phase.BACKWARD, ""):
                if BACKWARD in slots:
                    make = partial(self._backward_part, rows, entering)
                    now, _, more = self._in_first_ticks(rows, BACKWARD, now, make)
                    terms += more
                if WEIGHTS in slots:
                    terms += self._weights_slot(rows, now[FORWARD].rings, now[BACKWARD].rings)
            block.carry_in = tuple(x.id for x in inside)
            block.carry_out = tuple(x.id for x in carried(now, slots))
            for o, x in terms:
                self.made.setdefault(o, []).append(new.sum_output(block, x))
        return replaced(state, slots, new.close_loop(block, before))

    def _in_first_ticks(
        self, rows: TableRows, slot: StageAction, now: TickState, make: MakeSlot
    ) -> tuple[TickState, list[Tensor], Terms]:
        """The slots of a kind in the ticks of a loop that have them, the first ones."""
        new, works = self.new, self.schedule.works_in(slot, rows.ticks)
        if works == len(rows.ticks):
            after, found, terms = make(now)
            return {**now, slot: after}, found, terms
        before = carried(now, [slot])
        runs = new.number(rows.block) < works
        with new.branch(runs, Fraction(works, len(rows.ticks))) as block:
            inside = [new.body_input(block, x) for x in before]
            after, found, terms = make(replaced(now, [slot], inside))
            block.carry_in = tuple(x.id for x in inside)
            block.carry_out = tuple(x.id for x in carried({slot: after}, [slot]))
            found = [new.sum_output(block, new.visible(x)) for x in found]
            terms = [(o, new.sum_output(block, new.visible(x))) for o, x in terms]
        return replaced(now, [slot], new.close_loop(block, before)), found, terms

    def _forward_part(self, rows: TableRows, head: bool, state: TickState) -> SlotMade:
        """A forward slot, and with the `head` what follows behind the layers: the gradient that enters
        them."""
        now = state[FORWARD]
        handed, rings, terms = self._forward_slot(rows, rows.come(FORWARD, now.flow), now.rings)
        flow = rows.moved(FORWARD, handed, now.flow)
        entering, seeds = list[Tensor](), list[Tensor]()
        for stream in self.streams if head else ():
            found, more = self._head(rows, handed[: len(self.course.states)], stream)
            entering, terms = [*entering, *found], [*terms, *more]
        if head and now.seeds:
            each = zip(now.seeds, entering, self._turns(rows, FORWARD), strict=True)
            entering = []
            seeds = [dynamic_update(ring, x, place, IN_FLIGHT) for ring, x, place in each]
        return SlotState(flow, rings, seeds), entering, terms

    def _turns(self, rows: TableRows, slot: StageAction) -> list[Tensor]:
        """The position of each gradient of losses that waits."""
        places = [rows.microbatch(slot, True, s, self.schedule.turning) for s in self.streams]
        return [place for place in places for _ in self.course.seeds]

    def _backward_part(self, rows: TableRows, entering: Sequence[Tensor], state: TickState) -> SlotMade:
        """A backward slot, and what is before the layers, backward."""
        count, now, then = len(self.course.seeds), state[BACKWARD], state[FORWARD]
        if then.seeds:
            pairs = zip(then.seeds, self._turns(rows, BACKWARD), strict=True)
            entering = [dynamic_slice(ring, place, IN_FLIGHT) for ring, place in pairs]
        streams = [entering[at : at + count] for at in range(0, len(entering), count or 1)]
        come = rows.come(BACKWARD, now.flow)
        handed, late, terms = self._backward_slot(rows, come, then.rings, now.rings, streams)
        terms += [term for stream in self.streams for term in self._after(rows, handed, stream)]
        return SlotState(rows.moved(BACKWARD, handed, now.flow), late, []), [], terms
