"""The slots of a tick (`pipelined_step`): the work of all stages side by side, for the microbatches that they
have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

from mesh_tf_core.ir.blocks import ARRIVING, IN_FLIGHT, Block, Node
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import KINDS
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.dynamic import dynamic_slice, dynamic_update
from mesh_tf_core.ops.math import logical_or
from mesh_tf_core.tracing.microbatch_order import When, halves
from mesh_tf_core.tracing.table_rows import TableRows
from mesh_tf_core.tracing.virtual_stages import WHOLE_STAGE, LayerPart, OfParts, VirtualStageCopy

Terms = list[tuple[int, Tensor]]
"""Terms of sums, each with its sum."""


class StageSlots(VirtualStageCopy):
    """The work of every stage in a slot of a tick, and the work around the layers.

    Attributes:
      runs: the nodes over layers that a backward slot copies.
      flows: values that move through the stages; `in_rings`: those that are stored in rings for backward.
    """

    def _keep(self) -> None:
        """Settles what stays for backward."""
        order, chunk, self.stage_again = self.course, self.chunk, self.second == WHOLE_STAGE
        layers, back = order.body(order.forward), order.body(order.backward)
        self.stacks.update(o for n in order.over for _, o in order.body(n).stacked)
        self.flows, self.streams = (*order.states, *order.passes), range(self.schedule.streams)
        self.runs = order.over[self.second is None :]
        used = set[int]().union(*(order.reads[n.index] for n in self.runs))
        self.in_rings = self.flows if self.stage_again else tuple(i for i in order.passes if i in used)
        splits = self.schedule.last is StageAction.WEIGHTS and bool(order.seeds)
        # All layers of a stage that run again save, before one goes backward.
        again = {*layers.saved.values()} if self.stage_again else set[int]()

        def part(begin: int, end: int, forward: Block, backward: Block) -> LayerPart:
            read = {o for o, _ in backward.sliced} - again
            two = halves(backward, order.old, order.rows, again) if splits else ()
            keeps = [i for i, o in forward.saved.items() if o in read]
            return LayerPart(Dim(chunk.name, end - begin), begin, forward, backward, keeps, two)

        bodies = self.second or [(layers, back)]
        ends = pairwise((0, *(self.some(forward.begin or 0) for forward, _ in bodies[1:]), chunk.size))
        self.parted = [part(*span, *each) for span, each in zip(ends, bodies, strict=True)]

    def _of_parts(self, values: Sequence[Tensor], names: Callable[[LayerPart], Sequence[int]]) -> OfParts:
        """Some values by the parts of layers that they are of."""
        left = iter(values)
        return [dict(zip(names(part), left, strict=False)) for part in self.parted]

    # -- one microbatch --------------------------------------------------------------------------------------

    def _entered(
        self, stages: Block, number: Tensor, got: Mapping[int, Tensor], nodes: Sequence[Node]
    ) -> None:
        """What a stage reads for a microbatch, of which it has `got` some."""
        read = set[int]().union(*(self.course.reads[n.index] for n in nodes))
        passes = {i: x for i, x in got.items() if i in self.course.passes}
        self.take(number, passes, [i for i in self.course.stays if i in read], When.BEFORE)
        for i in (i for i in self.course.same if i in read):
            self.tensors.setdefault(i, self._whole(i))
        for o in dict.fromkeys(o for node in nodes for o in self.course.sliced[node.index]):
            self.tensors[o] = self.new.slice_into(stages, self.stack(o), self.own)

    def _terms(self, stages: Block, node: Node, works: Tensor, half: int | None = None) -> Terms:
        """What a stage adds to sums."""
        found, body = Terms(), self.course.body(node)
        body = body if half is None else self.parted[0].halves[half].body
        for stacks, pairs in ((True, body.stacked), (False, body.summed)):
            for o in (o for _, o in pairs if o in self.course.sums):
                x = self._delivered(o, o)
                x = where(works, x, 0) if node is self.course.forward else x
                stack = self.new.stack_output(stages, x, self.lie) if stacks else None
                found.append((o, self.new.sum_output(stages, x) if stack is None else stack))
        return found

    # -- one tick --------------------------------------------------------------------------------------------

    def _entering(self, number: Tensor) -> list[Tensor]:
        """What enters the first stage."""
        self.take(number, {}, (*self.course.states, *self.course.passes), When.BEFORE)
        return [*self._operands(self.course.forward), *(self.tensors[i] for i in self.course.passes)]

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
            held = [known[i] for i in self.in_rings]
            kept = [dynamic_update(r, x, place, IN_FLIGHT) for r, x in zip(into, held, strict=False)]
            self._entered(stages, number, known, (self.course.forward,))
            ends, keeps = self.layers_of(self.course.forward, stages, chunk, got[: len(self.course.states)])
            pairs = zip(into[len(held) :], (x for each in keeps for x in each.values()), strict=True)
            kept += [dynamic_update(r, x, place, IN_FLIGHT) for r, x in pairs]
            handed = [new.stack_output(stages, x) for x in (*ends, *got[len(self.course.states) :])]
            kept = [new.stack_output(stages, x) for x in kept]
            terms = self._terms(stages, self.course.forward, works)
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
        new, half = self.new, 0 if self.parted[0].halves else None
        with new.loop(self.stage, spread=True) as stages:
            stage, (works, number, chunk) = new.number(stages), rows.at(StageAction.BACKWARD, stages)
            place = rows.place(StageAction.BACKWARD, stages, StageAction.FORWARD) if rings else number
            begins = [rows.is_end(stage, chunk, True, stream) for stream in self.streams]
            # A slot that is idle takes what was put there: no gradient comes of it, if it is a number.
            got = [dynamic_slice(new.slice_into(stages, r), place, IN_FLIGHT) for r in rings]
            known = dict(zip(self.in_rings, got, strict=False))
            self._entered(stages, number, known, self.runs)
            for i in (*self.course.same, *self.course.sliced[self.course.backward.index]):
                maker, x = self.makers.get(i), self.tensors.get(i)
                if maker is not None and x is not None and maker.phase != Phase.FORWARD and is_float(x.dtype):
                    self.tensors[i] = where(works, x, 0)
            if self.stage_again:
                again = self.course.forward.in_phase(Phase.RECOMPUTE)
                self.layers_of(again, stages, chunk, [known[i] for i in self.course.states])
            come = [new.slice_into(stages, h) for h in held]
            seeds = come[: len(self.course.seeds)]
            for there, xs in zip(begins, entering, strict=False):
                seeds = [where(there, x, h) for x, h in zip(xs, seeds, strict=True)]
            seeds = [where(works, x, 0) for x in seeds]
            kept = self._of_parts(got[len(self.in_rings) :], lambda part: part.keeps)
            ends, between = self.layers_of(self.course.backward, stages, chunk, seeds, half, kept)
            beside = zip(self.course.rows, come[len(self.course.seeds) :], strict=True)
            ends += [self.tensors[o] + where(reduce(logical_or, begins), 0, h) for o, h in beside]
            handed = [new.stack_output(stages, x) for x in ends]
            if half is not None:
                place = rows.place(StageAction.BACKWARD, stages, StageAction.BACKWARD)
                pairs = zip(late, (x for each in between for x in each.values()), strict=True)
                puts = [dynamic_update(new.slice_into(stages, r), x, place, IN_FLIGHT) for r, x in pairs]
                late = [new.stack_output(stages, x) for x in puts]
            terms = self._terms(stages, self.course.backward, works, half)
        new.close_loop(stages, [])
        return handed, [*late], terms

    def _weights_slot(self, rows: TableRows, rings: Sequence[Tensor], late: Sequence[Tensor]) -> Terms:
        """Gradients of the weights of every stage; terms of sums."""
        new = self.new
        with new.loop(self.stage, spread=True) as stages:
            work = rows.at(StageAction.WEIGHTS, stages)
            place = rows.place(StageAction.WEIGHTS, stages, StageAction.FORWARD) if rings else work.number
            got = [dynamic_slice(new.slice_into(stages, r), place, IN_FLIGHT) for r in rings]
            self._entered(
                stages, work.number, dict(zip(self.in_rings, got, strict=False)), (self.course.backward,)
            )
            kept = self._of_parts(got[len(self.in_rings) :], lambda part: part.keeps)
            place = rows.place(StageAction.WEIGHTS, stages, StageAction.BACKWARD)
            stacks = [dynamic_slice(new.slice_into(stages, r), place, IN_FLIGHT) for r in late]
            between = self._of_parts(stacks, lambda part: part.between)
            self.layers_of(self.course.backward, stages, work.chunk, [], 1, kept, between)
            terms = self._terms(stages, self.course.backward, work.works, 1)
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
        return self.zeros(tensor, self.stage, *places)

    def _head(self, rows: TableRows, handed: Sequence[Tensor], stream: int) -> tuple[list[Tensor], Terms]:
        """What is behind the layers; the gradient that enters them, and terms of sums."""
        sums, count = (
            [o for o in self.course.sums if self.course.when(o) <= When.HEAD],
            len(self.course.seeds),
        )

        def make(number: Tensor) -> list[Tensor]:
            known = dict(
                zip(self.course.forward.outputs, self._left(rows, handed, True, stream), strict=False)
            )
            self.take(number, known, (*sums, *self.course.seeds), When.HEAD)
            seeds = self._operands(self.course.backward) if count else []
            return [*seeds, *(self.term(o, number) for o in sums)]

        made = rows.passing(StageAction.FORWARD, True, stream, make) or []
        return made[:count], [*zip(sums, made[count:], strict=False)]

    def _after(self, rows: TableRows, handed: Sequence[Tensor], stream: int) -> Terms:
        """What is before the layers, backward; terms of sums."""
        carried = self.course.backward.outputs[: len(self.course.seeds)]
        sums = [o for o in self.course.sums if self.course.when(o) is When.AFTER]

        def make(number: Tensor) -> list[Tensor]:
            left = self._left(rows, handed, False, stream)
            known = dict(zip((*carried, *self.course.rows), left, strict=True))
            self.take(number, known, sums, When.AFTER)
            return [self._delivered(o, o) for o in sums]

        made = rows.passing(StageAction.BACKWARD, False, stream, make) if sums else None
        return [*zip(sums, made or [], strict=False)]
