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
(`ir.stage_orders`); other readers, and other stacks, are converted from one order to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial, reduce
from itertools import pairwise

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import ARRIVING, IN_FLIGHT, TICK, Assign, Block, Feed, Node, Read
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import KINDS
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import add_n
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.index import dynamic_slice, dynamic_update
from mesh_tf_core.ops.math import logical_or
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.microbatch_order import MicrobatchOrder, When, halves
from mesh_tf_core.tracing.table_rows import SlotState, StageSlot, TableRows, TickState, carried, replaced
from mesh_tf_core.tracing.virtual_stages import (
    WHOLE_STAGE,
    LayerPart,
    VirtualStageCopy,
    added,
    by_parts,
    stacking,
)

FORWARD, BACKWARD, WEIGHTS = StageAction
Terms = list[tuple[int, Tensor]]
"""Terms of sums, each with its sum."""
SlotMade = tuple[SlotState, list[Tensor], Terms]
"""The state after a slot, what it hands to the next one, and terms of sums."""


class PipelinedStep(VirtualStageCopy):
    """A step in microbatches, or its forward operations, as a pipeline over the loop that `dim` counts.

    Attributes:
      runs: the nodes over layers that a backward slot copies.
      flows: values that move through the stages; `in_rings`: those that are stored in rings for backward.

    Raises:
      UserError: the loop cannot be a pipeline; with the reason and the remedy.
    """

    def run(self, wanted: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """The new graph and its tensors for some of the top level (the loss, metrics, gradients), by name."""
        for node in self.kept:
            op, body = node.op, node.body
            if isinstance(op, Read):
                known = self.lies if op.variable.name in self.lying else self.outside
                known[node.outputs[0]] = self.new.read(self.new.variables[op.variable.name])
            elif isinstance(op, Feed):
                self.outside[node.outputs[0]] = self.new.input(op.feed, op.type.shape.dims, op.type.dtype)
            elif isinstance(op, Assign):
                with self.new.phase(node.phase, node.scope):
                    value = self._of_variable(op.variable.name, node.inputs[0])
                    self.new.assign(self.new.variables[op.variable.name], value)
            elif body is not None and any(n.body and n.body.dim.name == self.layers for n in body.nodes):
                self._piped(body)
        grads = self.old.gradient_of
        return self.new, {n: self._of_variable(grads.get(t.id, ""), t.id) for n, t in wanted.items()}

    def _piped(self, batch: Block) -> None:
        """Microbatches that pass the stages, in place of the loop over them."""
        self.course = MicrobatchOrder(self.old, batch, self.names, self.layers, self.trained, self.refuse)
        if not self.course.seeds and any(node.phase != Phase.FORWARD for node, _ in self.old.walk()):
            raise self.refuse("the loss needs sums of the layers' values over the whole batch")
        self.totals = self.loops()
        if self.moves:
            with self.new.phase(Phase.BACKWARD, ""):
                stacks = self.totals.keys() & self.stacks
                self.lies.update((i, added(self.totals.pop(i), self.order)) for i in sorted(stacks))
        for inner, outer in batch.results:
            if inner in self.lies:
                self.lies[outer] = self.lies[inner]
            else:
                self.outside[outer] = self._total(inner)

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
        self, rows: TableRows, slot: StageAction, now: TickState, make: Callable[[TickState], SlotMade]
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

    def _keep(self) -> None:
        """Settles what stays for backward."""
        order, chunk, self.stage_again = self.course, self.chunk, self.second == WHOLE_STAGE
        layers, back = order.body(order.forward), order.body(order.backward)
        self.stacks.update(o for n in order.over for _, o in order.body(n).stacked)
        self.flows, self.streams = (*order.states, *order.passes), range(self.schedule.streams)
        self.runs = order.over[self.second is None :]
        used = set[int]().union(*(order.reads[n.index] for n in self.runs))
        self.in_rings = self.flows if self.stage_again else tuple(i for i in order.passes if i in used)
        splits = self.schedule.last is WEIGHTS and bool(order.seeds)
        # All layers of a stage that run again save, before one goes backward.
        again = {*layers.saved.values()} if self.stage_again else set[int]()

        def part(begin: int, end: int, forward: Block, backward: Block) -> LayerPart:
            read = {o for o, _ in backward.sliced} - again
            keeps = {o: i for i, o in forward.saved.items() if o in read}
            two = halves(backward, order.old, order.rows, again) if splits else (backward,)
            between = {o: i for i, o in two[0].stacked if o < 0}
            dim = Dim(chunk.name, end - begin)
            return LayerPart(dim, begin, stacking(forward, keeps.keys()), keeps, two, between)

        bodies = self.second or [(layers, back)]
        ends = pairwise((0, *(self._some(forward.begin or 0) for forward, _ in bodies[1:]), chunk.size))
        self.parted = [part(*span, *each) for span, each in zip(ends, bodies, strict=True)]
        self.keeps, self.between = [p.keeps for p in self.parted], [p.between for p in self.parted]

    def _some(self, only: int) -> int:
        """A number of layers of each stage; LayoutError if they do not have as many, and one more."""
        text, size = f"recompute {self.layers}:count={only}", self.chunk.size
        if only >= size:
            todo = f"write a smaller count, or {self.layers} to recompute all"
            raise LayoutError(f"{text}: a stage has {size} layer{'s' * (size > 1)} here; {todo}")
        return only

    # -- one microbatch --------------------------------------------------------------------------------------

    def _entered(self, slot: StageSlot, got: Mapping[int, Tensor], nodes: Sequence[Node]) -> None:
        """What a stage reads for a microbatch, of which it has `got` some."""
        read = set[int]().union(*(self.course.reads[n.index] for n in nodes))
        passes = {i: x for i, x in got.items() if i in self.course.passes}
        self.take(slot.number, passes, [i for i in self.course.stays if i in read], When.BEFORE)
        for i in (i for i in self.course.same if i in read):
            self.tensors[i] = self.whole(i)
        for o in dict.fromkeys(o for node in nodes for o in self.course.sliced[node.index]):
            self.tensors[o] = self.new.slice_into(slot.stages, self.stack(o), self.own)

    def _terms(self, slot: StageSlot, node: Node, half: int = 0) -> Terms:
        """What a stage adds to sums."""
        found, forward = Terms(), node is self.course.forward
        body = self.course.body(node) if forward else self.parted[0].backward[half]
        for stacks, pairs in ((True, body.stacked), (False, body.summed)):
            for o in (o for _, o in pairs if o in self.course.sums):
                x = where(slot.works, self.tensors[o], 0) if forward else self.tensors[o]
                stack = self.new.stack_output(slot.stages, x, self.lie) if stacks else None
                found.append((o, self.new.sum_output(slot.stages, x) if stack is None else stack))
        return found

    # -- one tick --------------------------------------------------------------------------------------------

    def _entering(self, number: Tensor) -> list[Tensor]:
        """What enters the first stage."""
        self.take(number, {}, (*self.course.states, *self.course.passes), When.BEFORE)
        return [*self._operands(self.course.forward), *(self.tensors[i] for i in self.course.passes)]

    def _forward_slot(
        self, rows: TableRows, come: Sequence[Tensor], rings: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], Terms]:
        """Every stage forward: what the stages hand on; the rings; terms of sums."""
        forward, count, put = self.course.forward, len(self.course.states), len(self.in_rings)
        ways = [(s, rows.passing(FORWARD, False, s, self._entering)) for s in self.streams]
        with rows.slot(FORWARD) as slot:
            got = slot.parts(come)
            for stream, entering in ways:
                enters = None if entering is None else slot.is_end(False, stream, slot.chunk)
                if enters is not None and entering is not None:
                    got = [where(enters, x, h) for x, h in zip(entering, got, strict=True)]
            known = dict(zip(self.flows, got, strict=True))
            kept = slot.put(rings[:put], [known[i] for i in self.in_rings])
            self._entered(slot, known, (forward,))
            bodies = [part.forward for part in self.parted]
            ends, keeps = self.layers_of(slot, forward, bodies, got[:count], self.keeps)
            kept += slot.put(rings[put:], keeps)
            handed = slot.handed((*ends, *got[count:]))
            terms = self._terms(slot, forward)
        return handed, kept, terms

    def _backward_slot(
        self,
        rows: TableRows,
        come: Sequence[Tensor],
        rings: Sequence[Tensor],
        late: Sequence[Tensor],
        entering: Sequence[Sequence[Tensor]],
    ) -> tuple[list[Tensor], list[Tensor], Terms]:
        """Every stage backward, or what of it the state needs, if weights have slots of their own.

        Args:
          late: rings of what these slots read.
          entering: by streams, the gradient at the last stage, if a microbatch enters there.

        Returns:
          What the stages hand on; these rings; terms of sums.
        """
        course, count = self.course, len(self.course.seeds)
        with rows.slot(BACKWARD) as slot:
            begins = [slot.is_end(True, stream, slot.chunk) for stream in self.streams]
            # A slot that is idle takes what was put there: no gradient comes of it, if it is a number.
            got = slot.taken(rings, FORWARD)
            known = dict(zip(self.in_rings, got, strict=False))
            self._entered(slot, known, self.runs)
            for i in (*course.same, *course.sliced[course.backward.index]):
                maker, x = self.old.producer.get(i), self.tensors.get(i)
                if maker is not None and x is not None and maker.phase != Phase.FORWARD and is_float(x.dtype):
                    self.tensors[i] = where(slot.works, x, 0)
            if self.stage_again:
                again = course.forward.in_phase(Phase.RECOMPUTE)
                self.layers_of(slot, again, [course.body(again)], [known[i] for i in course.states])
            moved = slot.parts(come)
            seeds = moved[:count]
            for there, xs in zip(begins, entering, strict=False):
                seeds = [where(there, x, h) for x, h in zip(xs, seeds, strict=True)]
            seeds = [where(slot.works, x, 0) for x in seeds]
            given = by_parts(got[len(self.in_rings) :], self.keeps)
            bodies = [part.backward[0] for part in self.parted]
            ends, between = self.layers_of(slot, course.backward, bodies, seeds, self.between, given)
            beside = zip(course.rows, moved[count:], strict=True)
            ends += [self.tensors[o] + where(reduce(logical_or, begins), 0, h) for o, h in beside]
            handed, late = slot.handed(ends), slot.put(late, between)
            terms = self._terms(slot, course.backward)
        return handed, late, terms

    def _weights_slot(self, rows: TableRows, rings: Sequence[Tensor], late: Sequence[Tensor]) -> Terms:
        """Gradients of the weights of every stage; terms of sums."""
        backward = self.course.backward
        with rows.slot(WEIGHTS) as slot:
            got = slot.taken(rings, FORWARD)
            self._entered(slot, dict(zip(self.in_rings, got, strict=False)), (backward,))
            kept = by_parts(got[len(self.in_rings) :], self.keeps)
            made = by_parts(slot.taken(late, BACKWARD), self.between)
            given = [one | two for one, two in zip(kept, made, strict=True)]
            self.layers_of(slot, backward, [part.backward[1] for part in self.parted], [], given=given)
            return self._terms(slot, backward, 1)

    def _flow(self, slot: StageAction, tensor: int) -> Tensor:
        """Nothing handed on yet."""
        places = () if KINDS[self.schedule.kind].one_way else (Dim(ARRIVING, self.schedule.waiting(slot)),)
        return self.zeros(tensor, self.stage, *places)

    def _head(self, rows: TableRows, handed: Sequence[Tensor], stream: int) -> tuple[list[Tensor], Terms]:
        """What is behind the layers; the gradient that enters them, and terms of sums."""
        course = self.course
        sums, count = [o for o in course.sums if course.known[o] <= When.HEAD], len(course.seeds)

        def make(number: Tensor) -> list[Tensor]:
            left = rows.left(FORWARD, handed, stream)
            known = dict(zip(course.forward.outputs, left, strict=False))
            self.take(number, known, (*sums, *course.seeds), When.HEAD)
            seeds = self._operands(course.backward) if count else []
            return [*seeds, *(self.term(o, number) for o in sums)]

        made = rows.passing(FORWARD, True, stream, make) or []
        return made[:count], [*zip(sums, made[count:], strict=False)]

    def _after(self, rows: TableRows, handed: Sequence[Tensor], stream: int) -> Terms:
        """What is before the layers, backward; terms of sums."""
        carried = self.course.backward.outputs[: len(self.course.seeds)]
        sums = [o for o in self.course.sums if self.course.known[o] is When.AFTER]

        def make(number: Tensor) -> list[Tensor]:
            left = rows.left(BACKWARD, handed, stream)
            known = dict(zip((*carried, *self.course.rows), left, strict=True))
            self.take(number, known, sums, When.AFTER)
            return [self.tensors[o] for o in sums]

        made = rows.passing(BACKWARD, False, stream, make) if sums else None
        return [*zip(sums, made or [], strict=False)]
