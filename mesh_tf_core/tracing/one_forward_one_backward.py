"""The schedule 1F1B of a pipeline (Narayanan et al. 2019, "PipeDream", section 3.2; with one update a step:
Narayanan et al. 2021, "Megatron-LM", section 2.2.1): backward of a microbatch begins as soon as it has gone
through all stages, so that what is in flight grows with the stages and not with the microbatches.

One SPMD program: a device does a forward slot and a backward slot in a turn. Of a step in M microbatches
(`microbatch`: sums over them, and which sums have to be whole before) the loop over the parts is taken apart,

  P - 1 turns   before the layers of microbatch t, forward
  M turns       the same; behind the layers, the loss and its gradient of microbatch t - (P - 1); backward
  P - 1 turns   backward

and in a turn t stage s is forward with microbatch t - s and backward with t - (2 P - 2 - s). Of what is
forward only the state at the beginning of a stage stays, in a ring of 2 P - 1 places: backward runs the stage
again from there. What comes before the layers is made again wherever something behind reads it. A slot that
waits has gradients of zero, and adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, TICK, Block, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Constant, add_n, scale
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.dynamic import dynamic_slice, dynamic_update
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.math import logical_and, maximum, minimum, mod
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.ticks import Schedule
from mesh_tf_core.tracing.copying import Copy
from mesh_tf_core.tracing.gradients import depends_on
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.microbatch import Accumulation
from mesh_tf_core.tracing.pipeline import check_stages
from mesh_tf_core.tracing.rounds import layers_of_stage
from mesh_tf_core.tracing.slots import Slots, When
from mesh_tf_core.tracing.standing import Kind, outer_reads

IN_FLIGHT = "in_flight"
"""Name of the dimension that counts the microbatches between the two slots of a stage."""


def one_forward_one_backward(
    graph: Graph, batch: str, parts: int, dim: str, stages: int, wanted: Mapping[str, Tensor]
) -> tuple[Graph, dict[str, Tensor]]:
    """A step as a pipeline over the loop that `dim` counts; otherwise as `microbatch.accumulate`.

    Raises:
      UserError: the loop cannot be one; why, and what to do.
    """
    return _OneForwardOneBackward(graph, batch, parts, dim, stages).run(wanted)


class _OneForwardOneBackward(Accumulation):
    """The step under construction.

    Attributes:
      forward, backward: the loop over the layers, and that of its gradient.
      again: what is copied is forward work that runs for backward.
      links: loops keep what backward reads.
    """

    def __init__(self, graph: Graph, batch: str, parts: int, dim: str, stages: int) -> None:
        check_stages(graph, dim, stages)
        super().__init__(graph, batch, parts)
        self.schedule = Schedule(parts, stages)
        self.layers = dim
        for name in (MICROBATCH, IN_FLIGHT):
            self.new.unsplit[name] = "microbatches go through the stages of a pipeline one after the other"
        self.again = self.links = False
        self.batches = self.smaller
        self.place: tuple[Tensor, Dim] | None = None
        trained = [v for v in graph.variables.values() if v.trainable]
        self.trained = depends_on(graph, [graph.read(v).id for v in trained])

    def refusal(self, what: str) -> UserError:
        return UserError(
            f"schedule 1f1b over {self.layers!r}: {what}; take the schedule gpipe, or do not split "
            f"{self.layers!r}"
        )

    def _loop(self, sums: Iterable[int]) -> None:
        sums = list(sums)
        needed = self._needed(sums)
        loops = [n for n in needed if n.body is not None and n.body.dim is not None]
        over = [n for n in loops if n.body.dim.name == self.layers]  # type: ignore[union-attr]
        if not over:
            super()._loop(sums)
            return
        forward = [n for n in over if n.phase == "forward"]
        backward = [n for n in over if n.phase != "forward"]
        if not backward:
            raise self.refusal("the loss needs sums over the whole batch of what the layers make")
        if len(forward) != 1 or len(backward) != 1 or backward[0].body.forward is not forward[0].body:  # type: ignore[union-attr]
            raise self.refusal("more than one loop runs over these layers")
        self.outside.update(_Turns(self, needed, forward[0], backward[0], sums).build())

    def _is_added(self, tensor: int) -> bool:
        """Not what adds other sums that have to be whole: a microbatch goes through the stages once."""
        maker = self.makers.get(tensor)
        if maker is not None and maker.phase == "forward" and maker.body is None:
            kinds = {self.standings.of(i).kind for i in maker.inputs}
            if self.standings.of(tensor).after and kinds <= {Kind.SAME, Kind.SUM}:
                return False
        return super()._is_added(tensor)

    def _whole(self, old: int) -> Tensor:
        around = self.smaller, self.place, self.again
        self.smaller, self.place, self.again = self.batches, None, False
        try:
            return super()._whole(old)
        finally:
            self.smaller, self.place, self.again = around

    def _phase(self, node: Node) -> str:
        return "recompute" if self.again and node.phase == "forward" else node.phase

    def _outer(self, tensor: int, block: Block, dtype: str | None = None) -> int:
        if self.place is None or self.layers in self.old.tensor(tensor).shape.names:
            return super()._outer(tensor, block, dtype)
        # What is no stage's own may be stored over the axes that tell stages apart.
        return Copy._outer(self, tensor, block, dtype)

    def _backward(self, body: Block, block: Block) -> None:
        if self.links:
            super()._backward(body, block)

    def _number(self, block: Block) -> Tensor:
        found = super()._number(block)
        if self.place is None or block.dim != self.place[1]:
            return found
        stage, own = self.place
        return stage * own.size + found

    @contextmanager
    def stage_of(self, stage: Tensor, layers: Dim, own: Dim) -> Iterator[None]:
        """What is copied inside is of one stage: of `layers`, it has its `own`."""
        self.smaller, self.place = {**self.batches, layers: own}, (stage, own)
        try:
            yield
        finally:
            self.smaller, self.place = self.batches, None

    @contextmanager
    def running_again(self) -> Iterator[None]:
        """What is copied inside runs for backward, and keeps what that reads."""
        self.again = self.links = True
        try:
            yield
        finally:
            self.again = self.links = False


class _Turns(Slots):
    """The loops over the turns."""

    def __init__(
        self,
        copy: _OneForwardOneBackward,
        needed: Sequence[Node],
        forward: Node,
        backward: Node,
        sums: Iterable[int],
    ) -> None:
        super().__init__(copy, needed, forward, backward, sums, copy.trained, copy.refusal)
        self.copy: _OneForwardOneBackward = copy
        self.new, schedule = copy.new, copy.schedule
        self.stages, self.parts = schedule.stages, schedule.microbatches
        self.stage = Dim(self.layers.name, self.stages)
        self.own = Dim(layers_of_stage(self.layers.name), self.layers.size // self.stages)
        self.ring = Dim(IN_FLIGHT, 2 * self.stages - 1)
        self.made: dict[int, list[Tensor]] = {}

    # -- one microbatch --------------------------------------------------------------------------------------

    def _of(self, number: Tensor, known: Mapping[int, Tensor], wanted: Iterable[int], until: When) -> None:
        """Takes the number of a microbatch, and makes what is wanted of it, of what is known."""
        copy = self.copy
        copy.number, copy.tensors, copy.blocks = number, {**copy.given, **known}, {}
        left, nodes = {*wanted} - copy.tensors.keys(), list[Node]()
        for node in reversed(self.needed):
            if self.slots[node.index] <= until and not left.isdisjoint(copy.made_by(node)):
                nodes.append(node)
                left |= outer_reads(self.old, node, copy.is_whole) - copy.tensors.keys()
        for fed in sorted(left & copy.fed.keys()):
            copy.tensors[fed] = dynamic_slice(copy.fed[fed], number, MICROBATCH)
        for node in reversed(nodes):
            copy._node(node)

    def _entering(self, turn: Tensor) -> list[Tensor]:
        """What enters the first stage."""
        self._of(minimum(turn, self.parts - 1), {}, (*self.states, *self.passes), When.BEFORE)
        return [*self.copy._operands(self.forward), *(self.copy.tensors[i] for i in self.passes)]

    def _layers(self, node: Node, stage: Tensor, init: Sequence[Tensor]) -> list[Tensor]:
        """The layers of a stage; their last states."""
        copy = self.copy
        named = copy._phase(node), node.scope, node.name
        with self.new.phase(*named), copy.stage_of(stage, self.layers, self.own):
            copy._looped(node, self._body(node), init)
        return [copy.tensors[o] for o in node.outputs[: len(init)]]

    def _enter(self, stages: Block, number: Tensor, got: Sequence[Tensor], nodes: Sequence[Node]) -> None:
        """What a stage reads for a microbatch."""
        copy = self.copy
        self._of(
            number, dict(zip(self.passes, got[len(self.states) :], strict=True)), self.stays, When.BEFORE
        )
        for i in self.same:
            copy.tensors.setdefault(i, copy._whole(i))
        for o in dict.fromkeys(o for node in nodes for o in self.sliced[node.index]):
            copy.tensors[o] = self.new.slice_into(stages, copy._whole(o), self.own)

    def _terms(self, stages: Block, node: Node, works: Tensor) -> dict[int, Tensor]:
        """What a stage adds to sums."""
        found, body = {}, self._body(node)
        for stacks, pairs in ((True, body.stacked), (False, body.summed)):
            for o in (o for _, o in pairs if o in self.sums):
                x = self.copy._delivered(o, o)
                x = where(works, x, 0) if node is self.forward else x
                stack = self.new.stack_output(stages, x, self.layers) if stacks else None
                found[o] = self.new.sum_output(stages, x) if stack is None else stack
        return found

    def _slot(self, item: Tensor) -> tuple[Tensor, Tensor]:
        """Whether a microbatch is there, and the number of one."""
        works = logical_and(item >= 0, item < self.parts)
        return works, maximum(minimum(item, self.parts - 1), 0)

    def _forward_slot(
        self, turn: Tensor, held: Sequence[Tensor], rings: Sequence[Tensor], leaves: bool
    ) -> tuple[list[Tensor], list[Tensor], dict[int, Tensor]]:
        """Every stage forward.

        Returns:
          What is handed on, and the rings; what leaves the last stage, if that is wanted; terms of sums.
        """
        new = self.new
        entering = self._entering(turn)
        with new.loop(self.stage, spread=True) as stages:
            stage = new.tensors[stages.index]  # type: ignore[index]
            works, number = self._slot(turn - stage)
            got = [
                where(stage < 1, x, new.slice_into(stages, h)) for x, h in zip(entering, held, strict=True)
            ]
            place = mod(turn, self.ring.size)
            kept = [
                dynamic_update(new.slice_into(stages, r), x, place, IN_FLIGHT)
                for r, x in zip(rings, got, strict=True)
            ]
            self._enter(stages, number, got, (self.forward,))
            ends = self._layers(self.forward, stage, got[: len(self.states)])
            handed = [new.stack_output(stages, x) for x in (*ends, *got[len(self.states) :])]
            kept = [new.stack_output(stages, x) for x in kept]
            last = stage > self.stages - 2
            left = [new.sum_output(stages, where(last, x, 0)) for x in ends] if leaves else []
            terms = self._terms(stages, self.forward, works)
        new.close_loop(stages, [])
        return [*(shift(x, 1, self.stage) for x in handed), *kept], left, terms

    def _backward_slot(
        self, turn: Tensor, held: Sequence[Tensor], rings: Sequence[Tensor], entering: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], dict[int, Tensor]]:
        """Every stage backward; `entering`: the gradient at the last stage, if a microbatch enters there.

        Returns:
          What is handed on; what leaves the first stage; terms of sums.
        """
        new, copy = self.new, self.copy
        with new.phase("backward", ""), new.loop(self.stage, spread=True) as stages:
            stage = new.tensors[stages.index]  # type: ignore[index]
            works, number = self._slot(turn + stage - (2 * self.stages - 2))
            place = mod(number + stage, self.ring.size)
            got = [dynamic_slice(new.slice_into(stages, r), place, IN_FLIGHT) for r in rings]
            self._enter(stages, number, got, (self.forward, self.backward))
            for i in (*self.same, *self.sliced[self.backward.index]):
                maker = self.copy.makers.get(i)
                if maker is not None and maker.phase != "forward" and is_float(copy.tensors[i].dtype):
                    copy.tensors[i] = where(works, copy.tensors[i], 0)
            with copy.running_again():
                self._layers(self.forward, stage, got[: len(self.states)])
            come, last = [new.slice_into(stages, h) for h in held], stage > self.stages - 2
            seeds = come[: len(self.seeds)]
            if entering:
                seeds = [where(last, x, h) for x, h in zip(entering, seeds, strict=True)]
            ends = self._layers(self.backward, stage, [where(works, x, 0) for x in seeds])
            beside = zip(self.rows, come[len(self.seeds) :], strict=True)
            ends += [copy.tensors[o] + where(last, 0, h) for o, h in beside]
            handed = [new.stack_output(stages, x) for x in ends]
            left = [new.sum_output(stages, where(stage < 1, x, 0)) for x in ends]
            terms = self._terms(stages, self.backward, works)
        with new.phase("backward", ""):
            new.close_loop(stages, [])
            return [shift(x, -1, self.stage) for x in handed], left, terms

    def _head(self, number: Tensor, left: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """What is behind the layers; the gradient that enters them, and terms of sums."""
        known = dict(zip(self.forward.outputs, left, strict=False))
        sums = [o for o in self.sums if self._when(o) <= When.HEAD]
        self._of(number, known, (*sums, *self.seeds), When.HEAD)
        terms = {o: self.copy._delivered(o, o) for o in sums}
        return self.copy._operands(self.backward), terms

    def _after(self, turn: Tensor, left: Sequence[Tensor]) -> dict[int, Tensor]:
        """What is before the layers, backward; terms of sums."""
        _, number = self._slot(turn - (2 * self.stages - 2))
        carried = self.backward.outputs[: len(self.seeds)]
        sums = [o for o in self.sums if self._when(o) is When.AFTER]
        self._of(number, dict(zip((*carried, *self.rows), left, strict=True)), sums, When.AFTER)
        return {o: self.copy._delivered(o, o) for o in sums}

    # -- the turns -------------------------------------------------------------------------------------------

    def build(self) -> dict[int, Tensor]:
        """Builds the loops; the sums over the whole batch."""
        new, p, m = self.new, self.stages, self.parts
        flows = (*self.states, *self.passes)
        held = [self._zeros(i) for i in flows]
        rings = [self._zeros(i, self.ring) for i in flows]
        carried = [*held, *rings]
        with new.loop(Dim(TICK, p - 1)) as turns:
            inside = [new.body_input(turns, x) for x in carried]
            handed, _, terms = self._forward_slot(self._number(turns), *_halves(inside), leaves=False)
            self._close(turns, inside, handed, terms)
        carried = new.close_loop(turns, carried)
        back = [self._zeros(i) for i in (*self.seeds, *self.rows)]
        with new.loop(Dim(TICK, m)) as turns:
            inside = [new.body_input(turns, x) for x in (*carried, *back)]
            number, flow = self._number(turns), inside[: len(carried)]
            turn = number + (p - 1)
            handed, left, terms = self._forward_slot(turn, *_halves(flow), leaves=True)
            entering, more = self._head(number, left)
            again = inside[len(carried) :], handed[len(flows) :], entering
            backwards, first, further = self._backward_slot(turn, *again)
            terms = {**terms, **more, **further, **self._after(turn, first)}
            self._close(turns, inside, [*handed, *backwards], terms)
        after = new.close_loop(turns, [*carried, *back])
        rings, back = after[len(flows) : len(carried)], after[len(carried) :]
        with new.phase("backward", ""), new.loop(Dim(TICK, p - 1)) as turns:
            inside = [new.body_input(turns, x) for x in back]
            turn = self._number(turns) + (m + p - 1)
            handed, first, terms = self._backward_slot(turn, inside, rings, ())
            handed = inside if p == 2 else handed  # Of one turn nobody reads what is handed on.
            self._close(turns, inside, handed, {**terms, **self._after(turn, first)})
        with new.phase("backward", ""):
            new.close_loop(turns, back)
            self.copy.number = None
            return {o: add_n(xs) for o, xs in self.made.items()}

    def _number(self, turns: Block) -> Tensor:
        assert turns.index is not None
        return self.new.tensors[turns.index]

    def _zeros(self, tensor: int, *dims: Dim) -> Tensor:
        """What the stages hold before the first turn."""
        type = self.old.tensor(tensor).type
        zero: Tensor = self.new.apply(Constant(0, type.dtype))
        return broadcast(zero, Shape([self.stage, *dims, *self.copy._shape(type.shape)]))

    def _close(
        self, turns: Block, inside: Sequence[Tensor], handed: Sequence[Tensor], terms: Mapping[int, Tensor]
    ) -> None:
        turns.carry_in = tuple(x.id for x in inside)
        turns.carry_out = tuple(x.id for x in handed)
        for o, x in terms.items():
            term = scale(x, 1 / self.parts) if self._kind(o) is Kind.SAME else x
            self.made.setdefault(o, []).append(self.new.sum_output(turns, term))


def _halves(xs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return xs[: len(xs) // 2], xs[len(xs) // 2 :]
