"""Copies of a step whose layers become virtual stages of a pipeline (`pipelined_step`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import ARRIVING, IN_FLIGHT, MICROBATCH, Block, Node, reads
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import PipelineSchedule
from mesh_tf_core.ir.scopes import having
from mesh_tf_core.ir.stored_order import PADDING
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Constant, add_n
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.dynamic import dynamic_slice, dynamic_update
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.math import maximum
from mesh_tf_core.ops.stages import JoinedParts, PartsInPlace
from mesh_tf_core.tracing.batch_linearity import Linearity, outer_reads
from mesh_tf_core.tracing.copying import Copy
from mesh_tf_core.tracing.gradients import depends_on
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.microbatch import Accumulation
from mesh_tf_core.tracing.microbatch_order import HalfBackward, MicrobatchOrder, When
from mesh_tf_core.tracing.stage_layers import added, check_stages, layers_of_stage, lying, reordered
from mesh_tf_core.tracing.table_rows import layer_numbers

OfParts = Sequence[Mapping[int, Tensor]]
"""For each part of a virtual stage's layers: tensors of a layer's body -> their stacks."""


class CopiedLayers(NamedTuple):
    """The layers that are copied: the number of the first of all, and of the stage's if it has several
    chunks; the model's numbers of the stage's layers, if some stage lacks one."""

    begins: Tensor
    first: Tensor | None
    numbers: Tensor | None


Again = Sequence[tuple[Block, Block]] | None
"""The bodies of layers of which some are recomputed, forward and backward, by parts (`lower.recomputed`);
None: stages keep all values that backward reads."""
WHOLE_STAGE: Again = ()
"""All layers of a virtual stage are recomputed, one after the other, from the input state."""


class LayerPart(NamedTuple):
    """Layers of a virtual stage, one after the other, whose backward reads the same of each.

    Attributes:
      dim: of their loop; `begin`: their first layer, of those of the virtual stage.
      forward, backward: their bodies.
      keeps: tensors of their body that are stacked in the forward run.
      halves: of their backward, if gradients of weights have slots of their own.
    """

    dim: Dim
    begin: int
    forward: Block
    backward: Block
    keeps: Sequence[int] = ()
    halves: Sequence[HalfBackward] = ()

    @property
    def between(self) -> Sequence[int]:
        """The tensors that one half of their backward makes for the other."""
        return self.halves[0].between if self.halves else ()


class VirtualStageCopy(Accumulation):
    """A step whose layers are copied as those of a stage.

    Args:
      dim, stages: the dimension of the layers, and the number of stages.
      schedule: of `ir.schedules`.
      again: what of layers backward recomputes.

    Attributes:
      course: the order of a microbatch's work.
      layers, stage, own, chunk: dimensions of all layers (its name), of the stages, of the layers of a stage,
        and of one of its chunks; `all`: as the model has them, `lie`: with those that stages lack.
      there: in a loop over layers, whether the stage has this one.
      parted: the layers of a virtual stage, `part`: those that are copied.
      held: the stacks of what they keep; `wanted`: this, and stacks of loops inside a layer.
      half: the copied half of the layers' gradient; `between`: stacks that one half computes for the other.
      stacks: stacks of layers for a whole stage.
      raw: variables in the order of chunks, as stored; `lies`: the same for sums of stacks.
    """

    course: MicrobatchOrder
    parted: Sequence[LayerPart]
    half: HalfBackward | None = None

    def __init__(
        self, graph: Graph, batch: str, parts: int, dim: str, stages: int, schedule: str, again: Again = None
    ) -> None:
        self.named, self.layers = schedule, dim
        check_stages(graph, dim, stages, schedule)
        self.raw: dict[int, Tensor] = {}
        self.lies: dict[int, Tensor] = {}
        super().__init__(graph, batch, parts)
        self.schedule = PipelineSchedule.named(schedule, stages, parts)
        self.has_rows = all(n.phase == Phase.FORWARD for n in self.kept)
        (size,) = graph.dims()[dim]
        self.stage, self.all = Dim(dim, stages), Dim(dim, size)
        self.order = self.schedule.order
        self.lie = Dim(dim, self.order.size(size))
        self.own = Dim(layers_of_stage(dim), self.lie.size // stages)
        self.chunk = Dim(self.own.name, self.own.size // self.order.chunks)
        for name in (MICROBATCH, IN_FLIGHT, ARRIVING):
            self.new.unsplit[name] = "microbatches pass through the pipeline stages one after another"
        self.second = again
        self.batches = self.sizes
        self.stacks: set[int] = set()
        self.place: CopiedLayers | None = None
        trained = [v for v in graph.variables.values() if v.trainable]
        self.trained = depends_on(graph, [graph.read(v).id for v in trained])
        self.moves = self.order.moves(size)
        found = lying(graph, self.kept, {dim: stages}, schedule)
        self.lying = {graph.producer[i].op.variable.name: read for i, (_, read) in found.items()}  # type: ignore[attr-defined]
        for name in self.lying:
            self.new.variables[name] = replace(graph.variables[name], order=self.order)

    def refusal(self, what: str) -> LayoutError:
        layers = repr(self.layers)
        return LayoutError(f"schedule {self.named} over {layers}: {what}; do not split {layers}")

    # -- the loops -------------------------------------------------------------------------------------------

    def _loop(self, sums: Iterable[int]) -> None:
        sums = list(sums)
        needed = self._needed(sums)
        over = [n for n in needed if n.body is not None and n.body.dim.name == self.layers]
        if not over:
            super()._loop(sums)
            return
        forward = [n for n in over if n.phase == Phase.FORWARD]
        backward = [n for n in over if n.phase != Phase.FORWARD]
        if not backward and not self.has_rows:
            raise self.refusal("the loss needs sums of the layers' values over the whole batch")
        one = len(forward) == 1 and len(backward) <= 1
        if not one or any(n.body.forward is not forward[0].body for n in backward):  # type: ignore[union-attr]
            raise self.refusal("the model has more than one loop over these layers")
        both = *forward, *backward
        self.course = MicrobatchOrder(self, needed, both, sums, self.trained, self.refusal)
        made = self.loops()
        stacks = {o: x for o, x in made.items() if self.moves and o in self.stacks}
        with self.new.phase(Phase.BACKWARD, ""):
            self.lies.update({o: added(x, self.order) for o, x in stacks.items()})
        self.outside.update({o: x for o, x in made.items() if o not in self.lies})

    def loops(self) -> dict[int, Tensor]:
        """Builds the loops over the ticks of the schedule; the sums that are wanted."""
        raise NotImplementedError

    def take(self, number: Tensor, known: Mapping[int, Tensor], wanted: Iterable[int], until: When) -> None:
        """Takes the number of a microbatch, and computes the wanted values from known ones."""
        self.number, self.tensors, self.blocks = number, {**self.given, **known}, {}
        left, nodes = {*wanted} - self.tensors.keys(), list[Node]()
        for node in reversed(self.course.needed):
            if self.course.runs[node.index] <= until and not left.isdisjoint(node.made):
                nodes.append(node)
                left |= outer_reads(self.old, node, self.is_whole) - self.tensors.keys()
        for fed in sorted(left & self.fed.keys()):
            self.tensors[fed] = dynamic_slice(self.fed[fed], number, MICROBATCH)
        for node in reversed(nodes):
            self._node(node)

    def term(self, tensor: int, number: Tensor) -> Tensor:
        """The term of a microbatch in a sum; of values of single examples, these in their rows of all."""
        x = self._delivered(tensor, tensor)
        if self.linearity.of(tensor).kind is not Linearity.PER_EXAMPLE:
            return x
        return dynamic_update(self._zero(x, Dim(MICROBATCH, self.parts)), x, number, MICROBATCH)

    def zeros(self, tensor: int, *dims: Dim) -> Tensor:
        """Zeros in the place of values of a part, with further dimensions in front."""
        return self._zero(self.old.tensor(tensor), *dims)

    def _zero(self, like: Tensor, *dims: Dim) -> Tensor:
        zero: Tensor = self.new.apply(Constant(0, like.dtype))
        return broadcast(zero, Shape([*dims, *self._shape(like.shape)]))

    # -- what has all layers ---------------------------------------------------------------------------------

    def _read(self, variable: Variable, tensor: int) -> Tensor:
        x = super()._read(self.new.variables[variable.name], tensor)
        self.raw.update({tensor: x} if variable.name in self.lying else {})
        return reordered(x, self.order, self.all, lies=True) if self.lying.get(variable.name) else x

    def _of_variable(self, variable: Variable, tensor: int) -> Tensor:
        if variable.name not in self.lying:
            return self._whole(tensor)
        if tensor in self.lies:
            return self.lies[tensor]
        return reordered(self._whole(tensor), self.order, self.all, lies=False)

    def stack(self, tensor: int) -> Tensor:
        """The variables that layers read by parts, in stored order."""
        if not self.moves:
            return self._whole(tensor)
        if tensor not in self.raw:
            whole = self._whole(tensor)
            with self.new.at_root():
                self.raw[tensor] = reordered(whole, self.order, self.all, lies=False)
        return self.raw[tensor]

    def _whole(self, old: int) -> Tensor:
        with having(self, sizes=self.batches, place=None):
            if old in self.lies and old not in self.outside:
                with self.new.at_root():
                    self.outside[old] = reordered(self.lies[old], self.order, self.all, lies=True)
            return super()._whole(old)

    # -- what has a stage's, or a chunk's --------------------------------------------------------------------

    def _outer(self, tensor: int, block: Block, dtype: str | None = None) -> int:
        if self.place is None:
            return super()._outer(tensor, block, dtype)
        if self.layers not in self.old.tensor(tensor).shape.names:
            # What is no stage's own may be stored over the axes that tell stages apart.
            return Copy._outer(self, tensor, block, dtype)
        with having(self, sizes=self.of_stage if tensor in self.stacks else self.of_chunk):
            return super()._outer(tensor, block, dtype)

    def _begun(self, body: Block, block: Block) -> None:
        if self.place is None or self.place.numbers is None or block.dim != self.part.dim:
            return
        self.there = self.new.slice_into(block, self.place.numbers) > PADDING
        if body.forward is not None:
            # No gradient comes of a layer that a stage lacks.
            self.tensors.update((i, where(self.there, self.tensors[i], 0)) for i in body.carry_in)

    def _ends(self, node: Node, body: Block) -> list[Tensor]:
        found, block = super()._ends(node, body), self.new.block
        if self.place is None or self.place.numbers is None or block.dim != self.part.dim:
            return found
        # A layer that a stage lacks hands on what it got.
        got = (self.new.tensors[i] for i in block.carry_in)
        return [where(self.there, x, h) for x, h in zip(found, got, strict=True)]

    def _body(self, node: Node, body: Block, block: Block) -> None:
        super()._body(node, body, block)
        if self.place is not None and block.dim == self.part.dim:
            block.first = None if self.place.first is None else self.place.first.id
            block.begin = self.part.begin if self.part.dim != self.chunk else None

    def _backward(self, node: Node, body: Block, block: Block) -> None:
        if self.half is not None and self.half.first and body is self.half.body:
            self.between = {i: self.new.stack_output(block, self.tensors[i]) for i in self.half.between}
        if node.phase == Phase.RECOMPUTE or self.place is None or block.forward is not None:
            super()._backward(node, body, block)
            return
        if body.forward is not None:
            return
        if block.dim == self.part.dim:
            self.held = {i: self.new.stack_output(block, self.tensors[i]) for i in self.part.keeps}
        else:
            stacked = ((i, o) for i, o in body.saved.items() if o in self.wanted)
            block.stacked += [(self.tensors[i].id, self._outer(o, block)) for i, o in stacked]

    def layers_of(
        self,
        node: Node,
        stages: Block,
        chunk: Tensor | None,
        init: Sequence[Tensor],
        half: int | None = None,
        kept: OfParts = (),
        between: OfParts = (),
    ) -> tuple[list[Tensor], OfParts]:
        """The layers of a virtual stage, or a half of their backward.

        Args:
          kept: for backward, what their parts kept; `between`: for its second half, what the first one made.

        Returns:
          Their last states; what their parts keep, or in the first half of backward, what it makes for the
          second.
        """
        ahead, states, block = node is not self.course.backward, [*init], self.course.body(node)
        results, parts = [o for _, o in block.results], range(len(self.parted))
        made, found = [dict[int, Tensor]() for _ in parts], [dict[int, Tensor]() for _ in parts]
        for at in parts if ahead else parts[::-1]:
            self._enter(self.parted[at], kept[at] if kept else {}, between[at] if between else {})
            self.half = None if half is None else self.part.halves[half]
            body = self.part.forward if ahead else self.part.backward
            body = block if node.phase == Phase.RECOMPUTE else body
            for o in results:
                self.tensors.pop(o, None)
            with self.new.phase(node.phase, node.scope, node.name, node.call):
                place = self._placed(stages, chunk)
                with having(self, sizes=self.of_chunk, place=place):
                    self._looped(node, body if self.half is None else self.half.body, states)
            states = [self.tensors[o] for o in node.outputs[: len(init)]]
            made[at] = {o: self.tensors[o] for o in results if o in self.tensors}
            found[at] = self.held if half is None else self.between
        self.half = None
        self.tensors.update({o: self._joined(o, [each[o] for each in made]) for o in made[0]})
        return states, found

    def _placed(self, stages: Block, chunk: Tensor | None) -> CopiedLayers:
        """The layers of a stage, or of one of its chunks if it has several."""
        stage, order, size = self.new.number(stages), self.order, self.chunk.size
        up = order.turns or order.mirrored
        step = stage * -2 + (order.rounds * order.stages - 1) if up else order.stages
        of_all, first = (stage, None) if chunk is None else (chunk * step + stage, chunk * size)
        numbers = layer_numbers(self.new, order, self.all, stages, self.own)
        return CopiedLayers(of_all * size, first, numbers)

    def _joined(self, tensor: int, parts: Sequence[Tensor]) -> Tensor:
        """A stack of all layers of a virtual stage, or a sum over them, of those of its parts."""
        if len(parts) == 1 or self.layers not in self.old.tensor(tensor).shape.names:
            return add_n(parts)
        op = JoinedParts(self.own.name) if self.order.chunks == 1 else PartsInPlace()
        found: Tensor = self.new.apply(op, *parts)
        if tensor in self.old.gradient_of:
            self.new.deliver([(found, self.old.gradient_of[tensor])])
        return found

    def _enter(self, part: LayerPart, kept: Mapping[int, Tensor], between: Mapping[int, Tensor]) -> None:
        """From now on layers of this part are copied, of which backward has what they kept."""
        self.part, self.held, self.between, self.wanted = part, {**kept}, {**between}, {*part.keeps}
        self.of_chunk = {**self.batches, self.all: part.dim}
        self.of_stage = {**self.batches, self.all: self.own if self.order.chunks > 1 else part.dim}
        for node, _ in part.forward.walk():  # those around first
            saved = node.body.saved if node.body is not None else {}
            self.wanted.update(i for i, o in saved.items() if o in self.wanted)
        saved = part.forward.saved
        self.tensors.update((saved[i], x) for i, x in kept.items() if i in saved)

    def some(self, only: int) -> int:
        """A number of layers of each stage; LayoutError if they do not have as many, and one more."""
        text, size = f"recompute {self.layers}:count={only}", self.chunk.size
        if only >= size:
            todo = f"write a smaller count, or {self.layers} to recompute all"
            raise LayoutError(f"{text}: a stage has {size} layer{'s' * (size > 1)} here; {todo}")
        return only

    def _parts(self, body: Block, block: Block) -> None:
        if self.half is not None and not self.half.first and body is self.half.body:
            self.tensors.update((i, self.new.slice_into(block, x)) for i, x in self.between.items())
            wanted = {i for i, _ in body.results}.union(*map(reads, body.nodes))
            parts = [(o, i) for o, i in body.sliced if i in wanted and i not in self.between]
            block.sliced += [(self.tensors[o].id, self._inner(block, i).id) for o, i in parts]
            return
        super()._parts(body, block)

    def _number(self, block: Block) -> Tensor:
        found = super()._number(block)
        if self.place is None or block.dim != self.part.dim:
            return found
        if self.place.numbers is None:
            return self.place.begins + found
        return maximum(self.new.slice_into(block, self.place.numbers), 0)
