"""The slots of a tick (`pipelined_step`): the work of all stages side by side, for the microbatches that they
have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import ARRIVING, Block, Node
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import KINDS
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.math import logical_or
from mesh_tf_core.tracing.microbatch_order import When, halves
from mesh_tf_core.tracing.table_rows import StageSlot, TableRows
from mesh_tf_core.tracing.virtual_stages import WHOLE_STAGE, LayerPart, VirtualStageCopy, stacking

Terms = list[tuple[int, Tensor]]
"""Terms of sums, each with its sum."""
FORWARD, BACKWARD, WEIGHTS = StageAction


class StageSlots(VirtualStageCopy):
    """The work of every stage in a slot of a tick, and the work around the layers.

    Attributes:
      parted: the layers of a virtual stage.
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

    def _left(
        self, rows: TableRows, kind: StageAction, handed: Sequence[Tensor], stream: int
    ) -> list[Tensor]:
        """What left the last stage of a stream forward, or the first backward, on all devices."""
        with rows.slot(kind) as slot:
            there = slot.is_end(kind is FORWARD, stream, None)
            return [self.new.sum_output(slot.stages, where(there, x, 0)) for x in slot.parts(handed)]

    def _flow(self, slot: StageAction, tensor: int) -> Tensor:
        """Nothing handed on yet."""
        places = () if KINDS[self.schedule.kind].one_way else (Dim(ARRIVING, self.schedule.waiting(slot)),)
        return self.zeros(tensor, self.stage, *places)

    def _head(self, rows: TableRows, handed: Sequence[Tensor], stream: int) -> tuple[list[Tensor], Terms]:
        """What is behind the layers; the gradient that enters them, and terms of sums."""
        course = self.course
        sums, count = [o for o in course.sums if course.known[o] <= When.HEAD], len(course.seeds)

        def make(number: Tensor) -> list[Tensor]:
            left = self._left(rows, FORWARD, handed, stream)
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
            left = self._left(rows, BACKWARD, handed, stream)
            known = dict(zip((*carried, *self.course.rows), left, strict=True))
            self.take(number, known, sums, When.AFTER)
            return [self.tensors[o] for o in sums]

        made = rows.passing(BACKWARD, False, stream, make) if sums else None
        return [*zip(sums, made or [], strict=False)]


def by_parts(values: Iterable[Tensor], names: Sequence[Iterable[int]]) -> list[dict[int, Tensor]]:
    """Some values by the parts of layers that they are of, and their names."""
    left = iter(values)
    return [dict(zip(each, left, strict=False)) for each in names]
