"""The loops over ticks of a pipeline (`pipelined_step`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from functools import partial, reduce

from mesh_tf_core.ir.blocks import ARRIVING, IN_FLIGHT, Block, Node
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import KINDS
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import add_n, scale
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.dynamic import dynamic_slice, dynamic_update
from mesh_tf_core.ops.math import logical_or
from mesh_tf_core.tracing.batch_linearity import Linearity
from mesh_tf_core.tracing.layer_parts import WHOLE_STAGE, LayerAgain, LayerPart, OfParts
from mesh_tf_core.tracing.microbatch_order import MicrobatchOrder, When, halves
from mesh_tf_core.tracing.table_rows import TableRows, TickState
from mesh_tf_core.tracing.virtual_stages import VirtualStageCopy

Terms = list[tuple[int, Tensor]]
"""Terms of sums, each with its sum."""
SlotMade = tuple[TickState, list[Tensor], Terms]
"""The state after a slot, what it hands to the next one, and terms of sums."""
MakeSlot = Callable[[TickState], SlotMade]


class TickLoops:
    """The loops over the ticks of a schedule (`PipelineSchedule.loops`).

    Args:
      copy: of the step whose layers become virtual stages.
      order: the order of a microbatch's work.
      again: the part of layers that backward recomputes; None: none.

    Attributes:
      held: values that move through the stages and are stored in rings for backward.
      layers: those of a virtual stage, in parts that keep the same.
    """

    def __init__(
        self, copy: VirtualStageCopy, order: MicrobatchOrder, again: LayerAgain | None = None
    ) -> None:
        self.copy, self.order, self.new, self.schedule = copy, order, copy.new, copy.schedule
        self.parts = self.schedule.microbatches
        self.streams = range(self.schedule.streams)
        self.stage, self.own = copy.stage, copy.own
        self.ring = Dim(IN_FLIGHT, self.schedule.in_flight)
        self.made: dict[int, list[Tensor]] = {}
        copy.stacks.update(o for n in order.over for _, o in order.body(n).stacked)
        self.flows = (*self.order.states, *self.order.passes)
        self._keep(order.body(order.forward), again)

    def _keep(self, layers: Block, again: LayerAgain | None) -> None:
        """Settles what stays for backward."""
        copy, order = self.copy, self.order
        self.stage_again = again is WHOLE_STAGE
        self.runs = order.over[again is None :]
        used = set[int]().union(*(self.order.reads[n.index] for n in self.runs))
        passes = tuple(i for i in self.order.passes if i in used)
        self.held = self.flows if self.stage_again else passes
        splits = self.schedule.last is StageAction.WEIGHTS and bool(order.seeds)
        read = {o for n in order.over[1:] for o, _ in order.body(n).sliced}
        saved = [] if self.stage_again else [i for i, o in layers.saved.items() if o in read]

        def part(dim: Dim, begin: int, second: LayerAgain | None) -> LayerPart:
            made = {o: i for i, o in layers.saved.items() if second and i not in second.kept}
            if self.stage_again:  # all layers of the stage run again, and save, before one goes backward
                parts = dict(order.body(order.backward).sliced)
                made = {o: parts[o] for o in layers.saved.values() if o in parts}
            two = halves(order.body(order.backward), order.old, order.rows, made) if splits else ()
            return LayerPart(dim, begin, second, second.kept if second else saved, two)

        second, chunk = None if self.stage_again else again, copy.chunk
        only = 0 if second is None else copy.some(second.only)
        ends = [(0, only, second), (only, chunk.size, None)] if only else [(0, chunk.size, second)]
        self.layers = [part(Dim(chunk.name, end - begin), begin, each) for begin, end, each in ends]
        copy.parted, copy.body = self.layers, layers

    def _of_parts(self, values: Sequence[Tensor], names: Callable[[LayerPart], Sequence[int]]) -> OfParts:
        """Some values by the parts of layers that they are of."""
        left = iter(values)
        return [dict(zip(names(part), left, strict=False)) for part in self.layers]

    # -- one microbatch --------------------------------------------------------------------------------------

    def _enter(self, stages: Block, number: Tensor, got: Mapping[int, Tensor], nodes: Sequence[Node]) -> None:
        """What a stage reads for a microbatch, of which it has `got` some."""
        copy, read = self.copy, set[int]().union(*(self.order.reads[n.index] for n in nodes))
        passes = {i: x for i, x in got.items() if i in self.order.passes}
        self.copy.take(self.order, number, passes, [i for i in self.order.stays if i in read], When.BEFORE)
        for i in (i for i in self.order.same if i in read):
            copy.tensors.setdefault(i, copy._whole(i))
        for o in dict.fromkeys(o for node in nodes for o in self.order.sliced[node.index]):
            copy.tensors[o] = self.new.slice_into(stages, copy.stack(o), self.own)

    def _terms(self, stages: Block, node: Node, works: Tensor, half: int | None = None) -> Terms:
        """What a stage adds to sums."""
        found, body = Terms(), self.order.body(node)
        body = body if half is None else self.layers[0].halves[half].body
        for stacks, pairs in ((True, body.stacked), (False, body.summed)):
            for o in (o for _, o in pairs if o in self.order.sums):
                x = self.copy._delivered(o, o)
                x = where(works, x, 0) if node is self.order.forward else x
                stack = self.new.stack_output(stages, x, self.copy.lie) if stacks else None
                found.append((o, self.new.sum_output(stages, x) if stack is None else stack))
        return found

    # -- one tick --------------------------------------------------------------------------------------------

    def _entering(self, number: Tensor) -> list[Tensor]:
        """What enters the first stage."""
        self.copy.take(self.order, number, {}, (*self.order.states, *self.order.passes), When.BEFORE)
        return [*self.copy._operands(self.order.forward), *(self.copy.tensors[i] for i in self.order.passes)]

    def _forward_slot(
        self, rows: TableRows, held: Sequence[Tensor], rings: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], Terms]:
        """Every stage forward: what the stages hand on; the rings; terms of sums."""
        new = self.new
        ways = [(s, rows.passing(StageAction.FORWARD, False, s, self._entering)) for s in self.streams]
        with new.loop(self.stage, spread=True) as stages:
            stage, (works, number, chunk) = new.number(stages), rows.at(StageAction.FORWARD, stages)
            place = rows.place(StageAction.FORWARD, stages, StageAction.FORWARD) if rings else number
            got = [new.slice_into(stages, h) for h in held]
            for stream, entering in ways:
                enters = None if entering is None else rows.is_end(stage, chunk, False, stream)
                if enters is not None and entering is not None:
                    got = [where(enters, x, h) for x, h in zip(entering, got, strict=True)]
            known = dict(zip(self.flows, got, strict=True))
            into = [new.slice_into(stages, r) for r in rings]
            held = [known[i] for i in self.held]
            kept = [dynamic_update(r, x, place, IN_FLIGHT) for r, x in zip(into, held, strict=False)]
            self._enter(stages, number, known, (self.order.forward,))
            ends, keeps = self.copy.layers_of(
                self.order.forward, stages, chunk, got[: len(self.order.states)]
            )
            pairs = zip(into[len(held) :], (x for each in keeps for x in each.values()), strict=True)
            kept += [dynamic_update(r, x, place, IN_FLIGHT) for r, x in pairs]
            handed = [new.stack_output(stages, x) for x in (*ends, *got[len(self.order.states) :])]
            kept = [new.stack_output(stages, x) for x in kept]
            terms = self._terms(stages, self.order.forward, works)
        new.close_loop(stages, [])
        return handed, kept, terms

    def _backward_slot(
        self,
        rows: TableRows,
        held: Sequence[Tensor],
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
        new, copy, half = self.new, self.copy, 0 if self.layers[0].halves else None
        with new.loop(self.stage, spread=True) as stages:
            stage, (works, number, chunk) = new.number(stages), rows.at(StageAction.BACKWARD, stages)
            place = rows.place(StageAction.BACKWARD, stages, StageAction.FORWARD) if rings else number
            begins = [rows.is_end(stage, chunk, True, stream) for stream in self.streams]
            # A slot that is idle takes what was put there: no gradient comes of it, if it is a number.
            got = [dynamic_slice(new.slice_into(stages, r), place, IN_FLIGHT) for r in rings]
            known = dict(zip(self.held, got, strict=False))
            self._enter(stages, number, known, self.runs)
            for i in (*self.order.same, *self.order.sliced[self.order.backward.index]):
                maker, x = copy.makers.get(i), copy.tensors.get(i)
                if maker is not None and x is not None and maker.phase != Phase.FORWARD and is_float(x.dtype):
                    copy.tensors[i] = where(works, x, 0)
            if self.stage_again:
                copy.again = True
                copy.layers_of(self.order.forward, stages, chunk, [known[i] for i in self.order.states])
                copy.again = False
            come = [new.slice_into(stages, h) for h in held]
            seeds = come[: len(self.order.seeds)]
            for there, xs in zip(begins, entering, strict=False):
                seeds = [where(there, x, h) for x, h in zip(xs, seeds, strict=True)]
            seeds = [where(works, x, 0) for x in seeds]
            kept = self._of_parts(got[len(self.held) :], lambda part: part.keeps)
            ends, between = copy.layers_of(self.order.backward, stages, chunk, seeds, half, kept)
            beside = zip(self.order.rows, come[len(self.order.seeds) :], strict=True)
            ends += [copy.tensors[o] + where(reduce(logical_or, begins), 0, h) for o, h in beside]
            handed = [new.stack_output(stages, x) for x in ends]
            if half is not None:
                place = rows.place(StageAction.BACKWARD, stages, StageAction.BACKWARD)
                pairs = zip(late, (x for each in between for x in each.values()), strict=True)
                puts = [dynamic_update(new.slice_into(stages, r), x, place, IN_FLIGHT) for r, x in pairs]
                late = [new.stack_output(stages, x) for x in puts]
            terms = self._terms(stages, self.order.backward, works, half)
        new.close_loop(stages, [])
        return handed, [*late], terms

    def _weights_slot(self, rows: TableRows, rings: Sequence[Tensor], late: Sequence[Tensor]) -> Terms:
        """Gradients of the weights of every stage; terms of sums."""
        new = self.new
        with new.loop(self.stage, spread=True) as stages:
            work = rows.at(StageAction.WEIGHTS, stages)
            place = rows.place(StageAction.WEIGHTS, stages, StageAction.FORWARD) if rings else work.number
            got = [dynamic_slice(new.slice_into(stages, r), place, IN_FLIGHT) for r in rings]
            self._enter(stages, work.number, dict(zip(self.held, got, strict=False)), (self.order.backward,))
            kept = self._of_parts(got[len(self.held) :], lambda part: part.keeps)
            place = rows.place(StageAction.WEIGHTS, stages, StageAction.BACKWARD)
            stacks = [dynamic_slice(new.slice_into(stages, r), place, IN_FLIGHT) for r in late]
            between = self._of_parts(stacks, lambda part: part.between)
            self.copy.layers_of(self.order.backward, stages, work.chunk, [], 1, kept, between)
            terms = self._terms(stages, self.order.backward, work.works, 1)
        new.close_loop(stages, [])
        return terms

    def _left(self, rows: TableRows, handed: Sequence[Tensor], end: bool, stream: int) -> list[Tensor]:
        """What left the last stage of a stream, or the first if not at the `end`, on all devices."""
        with self.new.loop(self.stage, spread=True) as stages:
            there = rows.is_end(self.new.number(stages), None, end, stream)
            parts = (self.new.slice_into(stages, x) for x in handed)
            left = [self.new.sum_output(stages, where(there, x, 0)) for x in parts]
        self.new.close_loop(stages, [])
        return left

    def _flow(self, slot: StageAction, tensor: int) -> Tensor:
        """Nothing handed on yet."""
        places = () if KINDS[self.schedule.kind].one_way else (Dim(ARRIVING, self.schedule.waiting(slot)),)
        return self.copy.zeros(tensor, self.stage, *places)

    def _head(self, rows: TableRows, handed: Sequence[Tensor], stream: int) -> tuple[list[Tensor], Terms]:
        """What is behind the layers; the gradient that enters them, and terms of sums."""
        sums, count = [o for o in self.order.sums if self.order.when(o) <= When.HEAD], len(self.order.seeds)

        def make(number: Tensor) -> list[Tensor]:
            known = dict(
                zip(self.order.forward.outputs, self._left(rows, handed, True, stream), strict=False)
            )
            self.copy.take(self.order, number, known, (*sums, *self.order.seeds), When.HEAD)
            seeds = self.copy._operands(self.order.backward) if count else []
            return [*seeds, *(self.copy.term(o, number) for o in sums)]

        made = rows.passing(StageAction.FORWARD, True, stream, make) or []
        return made[:count], [*zip(sums, made[count:], strict=False)]

    def _after(self, rows: TableRows, handed: Sequence[Tensor], stream: int) -> Terms:
        """What is before the layers, backward; terms of sums."""
        carried = self.order.backward.outputs[: len(self.order.seeds)]
        sums = [o for o in self.order.sums if self.order.when(o) is When.AFTER]

        def make(number: Tensor) -> list[Tensor]:
            left = self._left(rows, handed, False, stream)
            known = dict(zip((*carried, *self.order.rows), left, strict=True))
            self.copy.take(self.order, number, known, sums, When.AFTER)
            return [self.copy._delivered(o, o) for o in sums]

        made = rows.passing(StageAction.BACKWARD, False, stream, make) if sums else None
        return [*zip(sums, made or [], strict=False)]

    # -- the loops over ticks --------------------------------------------------------------------------------

    def build(self) -> dict[int, Tensor]:
        """Builds the loops of the schedule (`PipelineSchedule.loops`); the sums over the whole batch."""
        new, order, of, layers = self.new, self.order, self.schedule, self.layers
        rings = [self.copy.zeros(i, self.stage, self.ring) for i in self.held]
        rings += [self.copy.zeros(i, self.stage, self.ring, part.dim) for part in layers for i in part.keeps]
        state = TickState([self._flow(StageAction.FORWARD, i) for i in self.flows], rings, [], [], [])
        for ticks in of.loops:
            slots = {slot for slot in StageAction if of.works_in(slot, ticks)}
            slots &= {*StageAction} if order.seeds else {StageAction.FORWARD}
            if ticks.start and of.turning and not state.seeds:
                turn = Dim(IN_FLIGHT, of.turning)
                state = state._replace(
                    seeds=[self.copy.zeros(i, turn) for _ in self.streams for i in order.seeds]
                )
            if StageAction.BACKWARD in slots and not state.back:
                back = [self._flow(StageAction.BACKWARD, i) for i in (*order.seeds, *order.rows)]
                ring = Dim(IN_FLIGHT, of.ring(StageAction.BACKWARD))
                late = [
                    self.copy.zeros(i, self.stage, ring, part.dim) for part in layers for i in part.between
                ]
                state = state._replace(back=back, late=late)
            with new.phase(Phase.FORWARD if StageAction.FORWARD in slots else Phase.BACKWARD, ""):
                state = self._loop(ticks, slots, state) if slots else state
        with new.phase(Phase.BACKWARD, ""):
            self.copy.number = None
            return {o: add_n(xs) for o, xs in self.made.items()}

    def _loop(self, ticks: range, slots: Set[StageAction], state: TickState) -> TickState:
        """A loop over ticks with these slots; the state after it."""
        new, forward, backward = self.new, StageAction.FORWARD in slots, StageAction.BACKWARD in slots
        rows = TableRows(new, self.schedule, self.stage, ticks)
        # What others do not change they only read.
        carries = (forward, forward, backward, backward, forward)
        carried = state.taken(carries)
        with new.loop(rows.dim) as block:
            inside, rows = [new.body_input(block, x) for x in carried], replace(rows, block=block)
            now = state.of(inside, carries)
            entering, terms = list[Tensor](), Terms()
            if forward:
                make = partial(self._forward, rows, rows.ticks.start > 0)
                now, entering, terms = self._in_first_ticks(rows, StageAction.FORWARD, now, make)
            with new.phase(Phase.BACKWARD, ""):
                if backward:
                    make = partial(self._backward, rows, entering)
                    now, _, more = self._in_first_ticks(rows, StageAction.BACKWARD, now, make)
                    terms += more
                if StageAction.WEIGHTS in slots:
                    terms += self._weights_slot(rows, now.rings, now.late)
            self._close(block, inside, now.taken(carries), terms)
        return state.of(new.close_loop(block, carried), carries)

    def _in_first_ticks(self, rows: TableRows, slot: StageAction, now: TickState, make: MakeSlot) -> SlotMade:
        """The slots of a kind in the ticks of a loop that have them, the first ones."""
        new, works = self.new, self.schedule.works_in(slot, rows.ticks)
        if works == len(rows.ticks):
            return make(now)
        forward = slot is StageAction.FORWARD
        carries = (forward, forward, not forward, not forward, forward)
        before = now.taken(carries)
        assert rows.block is not None
        runs = new.number(rows.block) < works
        with new.branch(runs, Fraction(works, len(rows.ticks))) as block:
            inside = [new.body_input(block, x) for x in before]
            after, found, terms = make(now.of(inside, carries))
            block.carry_in = tuple(x.id for x in inside)
            block.carry_out = tuple(x.id for x in after.taken(carries))
            found = [new.sum_output(block, new.visible(x)) for x in found]
            terms = [(o, new.sum_output(block, new.visible(x))) for o, x in terms]
        return now.of(new.close_loop(block, before), carries), found, terms

    def _forward(self, rows: TableRows, head: bool, now: TickState) -> SlotMade:
        """A forward slot, and with the `head` what follows behind the layers: the gradient that enters
        them."""
        come = rows.come(StageAction.FORWARD, now.flow)
        handed, rings, terms = self._forward_slot(rows, come, now.rings)
        flow = rows.moved(StageAction.FORWARD, handed, now.flow)
        entering, seeds = list[Tensor](), list[Tensor]()
        for stream in self.streams if head else ():
            found, more = self._head(rows, handed[: len(self.order.states)], stream)
            entering, terms = [*entering, *found], [*terms, *more]
        if head and now.seeds:
            each = zip(now.seeds, entering, self._turns(rows, StageAction.FORWARD), strict=True)
            entering = []
            seeds = [dynamic_update(ring, x, place, IN_FLIGHT) for ring, x, place in each]
        return now._replace(flow=flow, rings=rings, seeds=seeds), entering, terms

    def _turns(self, rows: TableRows, slot: StageAction) -> list[Tensor]:
        """The position of each gradient of losses that waits."""
        places = [rows.microbatch(slot, True, s, self.schedule.turning) for s in self.streams]
        return [place for place in places for _ in self.order.seeds]

    def _backward(self, rows: TableRows, entering: Sequence[Tensor], now: TickState) -> SlotMade:
        """A backward slot, and what is before the layers, backward."""
        count = len(self.order.seeds)
        if now.seeds:
            pairs = zip(now.seeds, self._turns(rows, StageAction.BACKWARD), strict=True)
            entering = [dynamic_slice(ring, place, IN_FLIGHT) for ring, place in pairs]
        streams = [entering[at : at + count] for at in range(0, len(entering), count or 1)]
        come = rows.come(StageAction.BACKWARD, now.back)
        handed, late, terms = self._backward_slot(rows, come, now.rings, now.late, streams)
        terms += [term for stream in self.streams for term in self._after(rows, handed, stream)]
        back = rows.moved(StageAction.BACKWARD, handed, now.back)
        return now._replace(back=back, late=late), [], terms

    def _close(self, ticks: Block, inside: Sequence[Tensor], handed: Sequence[Tensor], terms: Terms) -> None:
        ticks.carry_in = tuple(x.id for x in inside)
        ticks.carry_out = tuple(x.id for x in handed)
        for o, x in terms:
            term = scale(x, 1 / self.parts) if self.order.kind(o) is Linearity.REPLICATED else x
            self.made.setdefault(o, []).append(self.new.sum_output(ticks, term))
