"""Copies of a microbatch's work whose layers are those of a stage of a pipeline (`pipelined_step`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial, reduce
from typing import NamedTuple

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import (
    ARRIVING,
    IN_FLIGHT,
    MICROBATCH,
    Block,
    Node,
    Read,
    layers_of_stage,
    loop_dims,
)
from mesh_tf_core.ir.dims import Dim, Shape, divisors
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import GPIPE, PipelineSchedule, rounds_of
from mesh_tf_core.ir.stage_orders import PADDING, Interleaved
from mesh_tf_core.ir.tensor import Tensor, having
from mesh_tf_core.ops.basic import Constant, add_n
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.index import dynamic_slice, dynamic_update
from mesh_tf_core.ops.math import maximum
from mesh_tf_core.ops.neighbours import ReverseAlong
from mesh_tf_core.ops.shape import concat, reshape, slice_dim, transpose
from mesh_tf_core.ops.stages import JoinedParts, PartsInPlace
from mesh_tf_core.tracing.copying import CopiedTensors, LoopedCopy, batch_names
from mesh_tf_core.tracing.gradients import depends_on
from mesh_tf_core.tracing.graph import Graph, graph_of
from mesh_tf_core.tracing.microbatch_order import MicrobatchOrder, When
from mesh_tf_core.tracing.table_rows import StageSlot, layer_numbers


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
      forward: their body, which stacks what backward reads; `keeps`: these stacks -> tensors of the body.
      backward: their backward, or its two halves; `between`: the stacks that the first makes for the second
        -> tensors of its body.
    """

    dim: Dim
    begin: int
    forward: Block
    keeps: Mapping[int, int]
    backward: Sequence[Block]
    between: Mapping[int, int]


def stacking(block: Block, wanted: Set[int]) -> Block:
    """A loop that stacks `wanted` of what it saves, as do loops inside, and saves nothing else."""
    kept = [(i, o) for i, o in block.saved.items() if o in wanted]
    inside = wanted | {i for i, _ in kept}
    nodes = [n if n.body is None else replace(n, body=stacking(n.body, inside)) for n in block.nodes]
    return replace(block, nodes=nodes, saved={}, stacked=[*block.stacked, *kept])


class VirtualStageCopy(LoopedCopy):
    """A step in microbatches whose layers are copied as those of a stage.

    Args:
      graph: of `microbatch.Accumulation`, and updates, which are left out; `batch`: its dimension of the
        batch.
      parts: number of microbatches.
      dim, stages: the dimension of the layers, and the number of stages.
      schedule: of `ir.schedules`.
      again: what of layers backward recomputes.

    Attributes:
      course: the order of a microbatch's work.
      layers, stage, own, chunk: dimensions of all layers (its name), of the stages, of the layers of a stage,
        and of one of its chunks; `all`: as the model has them, `lie`: with those that stages lack.
      there: in a loop over layers, whether the stage has this one.
      parted: the layers of a virtual stage; `part`: those that are copied.
      stacks: stacks of layers for a whole stage.
      outside: old tensor -> its copy outside of all loops, in the model's order; `lies`: the same of stacks
        of layers, in the order of stages.
      totals: a tensor of a microbatch -> its sum over all.
    """

    course: MicrobatchOrder
    parted: Sequence[LayerPart]
    part: LayerPart

    def __init__(
        self, graph: Graph, batch: str, parts: int, dim: str, stages: int, schedule: str, again: Again = None
    ) -> None:
        super().__init__(graph)
        self.layers, self.parts, self.second = dim, parts, again
        self.refuse = partial(refused, schedule, dim)
        self.schedule = PipelineSchedule.named(schedule, stages, parts)
        self.names = batch_names(graph, batch)
        (size,) = {n.body.dim.size for n, _ in graph.walk() if n.body is not None and n.body.dim.name == dim}
        self.stage, self.all = Dim(dim, stages), Dim(dim, size)
        self.order = self.schedule.order
        self.lie = Dim(dim, self.order.size(size))
        self.own = Dim(layers_of_stage(dim), self.lie.size // stages)
        self.chunk = Dim(self.own.name, self.own.size // self.order.chunks)
        for name in (MICROBATCH, IN_FLIGHT, ARRIVING):
            self.new.unsplit[name] = "microbatches pass through the pipeline stages one after another"
        self.place: CopiedLayers | None = None
        self.stacks: set[int] = set()
        self.lies: dict[int, Tensor] = {}
        self.totals: dict[int, Tensor] = {}
        trained = [v for v in graph.variables.values() if v.trainable]
        self.trained = depends_on(graph, [graph.read(v).id for v in trained])
        self.moves = self.order.moves(size)
        self.lying = lying(self.kept, dim) if self.moves else frozenset[str]()
        for name in self.lying:
            self.new.variables[name] = replace(graph.variables[name], order=self.order)

    def take(self, number: Tensor, known: Mapping[int, Tensor], wanted: Iterable[int], until: When) -> None:
        """Takes the number of a microbatch, and computes the wanted values from known ones."""
        course, batch = self.course, self.course.batch
        self.blocks, self.tensors = {}, CopiedTensors({course.number: number, **known}, self.whole)
        left, nodes = {*wanted} - self.tensors.keys(), list[Node]()
        for node in reversed(batch.nodes):
            if course.runs[node.index] <= until and not left.isdisjoint(node.made):
                nodes.append(node)
                left |= course.outer(node) - self.tensors.keys()
        for outer, inner in batch.sliced:
            if inner in left:
                self.tensors[inner] = dynamic_slice(self.whole(outer), number, MICROBATCH)
        for node in reversed(nodes):
            self._node(node)

    def term(self, tensor: int, number: Tensor) -> Tensor:
        """The term of a microbatch in a sum; of values of single examples, these in their rows of all."""
        x = self.tensors[tensor]
        if all(tensor != i for i, _ in self.course.batch.stacked):
            return x
        return dynamic_update(self.zeros(tensor, Dim(MICROBATCH, self.parts)), x, number, MICROBATCH)

    def zeros(self, tensor: int, *dims: Dim) -> Tensor:
        """Zeros in the place of values of a microbatch, with further dimensions in front."""
        like = self.old.tensor(tensor)
        zero: Tensor = self.new.apply(Constant(0, like.dtype))
        return broadcast(zero, Shape([*dims, *like.shape]))

    # -- what has all layers ---------------------------------------------------------------------------------

    def whole(self, old: int) -> Tensor:
        """The same as in other copies of steps in loops; a stack in the model's order."""
        with having(self, sizes={}, place=None):
            if old in self.lies and old not in self.outside:
                phase = Phase.FORWARD if isinstance(self.makers[old].op, Read) else Phase.BACKWARD
                with self.new.at_root(), self.new.phase(phase, ""):
                    self.outside[old] = reordered(self.lies[old], self.order, self.all, lies=True)
            return super().whole(old)

    def _total(self, tensor: int) -> Tensor:
        """The sum of a tensor over all microbatches, made of sums that the ticks make."""
        if tensor in self.lies:
            return self.whole(tensor)
        if tensor not in self.totals:
            maker = self.makers[tensor]
            self.totals.update(self._alone(maker, {i: self._total(i) for i in self.course.terms(maker)}))
        return self.totals[tensor]

    def stack(self, tensor: int) -> Tensor:
        """The stack that layers read by parts, in the order of stages."""
        if not self.moves:
            return self.whole(tensor)
        if tensor not in self.lies:
            whole = self.whole(tensor)
            with self.new.at_root():
                self.lies[tensor] = reordered(whole, self.order, self.all, lies=False)
        return self.lies[tensor]

    def _of_variable(self, variable: str, tensor: int) -> Tensor:
        """A tensor that belongs to a variable, as that lies; "": to none."""
        return self.stack(tensor) if variable in self.lying else self.whole(tensor)

    # -- what has a stage's, or a chunk's --------------------------------------------------------------------

    def _outer(self, tensor: int, block: Block, inner: Tensor, delivers: bool = True) -> int:
        if self.place is None:
            return super()._outer(tensor, block, inner)
        # What is no stage's own may be stored over the axes that tell stages apart.
        own = tensor < 0 or self.layers in self.old.tensor(tensor).shape.names
        several = self.order.chunks > 1 and tensor in self.stacks
        with having(self, sizes={self.all: self.own if several else self.part.dim}):
            return super()._outer(tensor, block, inner, own)

    def _begun(self, body: Block, block: Block) -> None:
        place = self.place
        if place is None or block.dim != self.part.dim or body.index is None:
            return
        block.first = None if place.first is None else place.first.id
        block.begin = self.part.begin if self.part.dim != self.chunk else None
        if place.numbers is None:
            self.tensors[body.index] = place.begins + self.new.number(block)
            return
        number = self.new.slice_into(block, place.numbers)
        self.tensors[body.index], self.there = maximum(number, 0), number > PADDING
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

    def layers_of(
        self,
        slot: StageSlot,
        node: Node,
        bodies: Sequence[Block],
        init: Sequence[Tensor],
        makes: Sequence[Iterable[int]] = (),
        given: Sequence[Mapping[int, Tensor]] = (),
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The layers of a virtual stage, or a half of their backward.

        Args:
          bodies: of their loops, by parts.
          makes: the stacks that these make for other slots; `given`: those that other slots made for them.

        Returns:
          Their last states; these stacks.
        """
        ahead, states, parts = node is not self.course.backward, [*init], range(len(self.parted))
        results = [o for _, o in self.course.body(node).results]
        made, found = [dict[int, Tensor]() for _ in parts], [list[Tensor]() for _ in parts]
        for at in parts if ahead else parts[::-1]:
            self.part, own = self.parted[at], makes[at] if makes else ()
            for o in (*results, *own):
                self.tensors.pop(o, None)
            self.tensors.update(given[at] if given else {})
            with self.new.phase(node.phase, node.scope, node.name, node.call):
                place = self._placed(slot)
                with having(self, sizes={self.all: self.part.dim}, place=place):
                    self._looped(node, bodies[at], states)
            states = [self.tensors[o] for o in node.outputs[: len(init)]]
            made[at] = {o: self.tensors[o] for o in results if o in self.tensors}
            found[at] = [self.tensors[o] for o in own]
        self.tensors.update({o: self._joined(o, [each[o] for each in made]) for o in made[0]})
        return states, [x for each in found for x in each]

    def _placed(self, slot: StageSlot) -> CopiedLayers:
        """The layers of a stage, or of one of its chunks if it has several."""
        stage, chunk, order, size = self.new.number(slot.stages), slot.chunk, self.order, self.chunk.size
        up = order.turns or order.mirrored
        step = stage * -2 + (order.rounds * order.stages - 1) if up else order.stages
        of_all, first = (stage, None) if chunk is None else (chunk * step + stage, chunk * size)
        numbers = layer_numbers(self.new, order, self.all, slot.stages, self.own)
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


def by_parts(values: Iterable[Tensor], names: Sequence[Iterable[int]]) -> list[dict[int, Tensor]]:
    """Some values by the parts of layers that they are of, and their names."""
    left = iter(values)
    return [dict(zip(each, left, strict=False)) for each in names]


# -- layers as stages store them -----------------------------------------------------------------------------


def check_stages(graph: Graph, dim: str, count: int, schedule: str = GPIPE) -> None:
    """LayoutError if the loops over a dimension cannot be this many stages of a schedule."""
    rounds, loops = rounds_of(schedule), loop_dims(graph)
    for node in loops[dim]:
        size = node.body.dim.size if node.body else 0
        # Embedding and head may be all that the first and the last virtual stage have.
        if count * rounds > size + 2 * (rounds > 1):
            times = f" times {rounds} rounds" if rounds > 1 else ""
            outer = {n.body.dim for n, *_ in loops.values() if n in graph.nodes and n.body}
            longer = sorted((d for d in outer if d.size > size), key=lambda d: d.size)
            other = f", or split {longer[-1].name!r}, a loop of {longer[-1].size}" if longer else ""
            raise LayoutError(
                f"pipeline over {dim!r}: {count} stages{times} are too many for a loop of {size} "
                f"layer{'s' * (size != 1)}; use fewer stages{' or rounds' * (rounds > 1)}{other}"
            )
        if node not in graph.nodes:
            raise LayoutError(
                f"pipeline over {dim!r}: this loop is inside another loop; split the outer loop instead"
            )


def refused(schedule: str, dim: str, what: str) -> LayoutError:
    """The error for a step whose layers cannot be stages."""
    return LayoutError(f"schedule {schedule} over {dim!r}: {what}; do not split {dim!r}")


def lying(nodes: Iterable[Node], dim: str) -> frozenset[str]:
    """The variables that loops over a dimension read by parts, in some nodes or inside of them."""
    every = [node for node, _ in Block(-1, nodes=[*nodes]).walk()]
    stored = {node.outputs[0]: node.op.variable.name for node in every if isinstance(node.op, Read)}
    loops = (node.body for node in every if node.body is not None and node.body.dim.name == dim)
    return frozenset(stored[outer] for body in loops for outer, _ in body.sliced if outer in stored)


def reordered(x: Tensor, order: Interleaved, layers: Dim, *, lies: bool) -> Tensor:
    """x, whose first dimension counts layers, in the other order.

    Args:
      layers: the dimension as the model has it.
      lies: x has the order of stored variables.

    Raises:
      LayoutError: virtual stages of unequal numbers of layers; nothing else can read their dimension.
    """
    name, rest, parts = layers.name, x.shape.dims[1:], order.stages * order.rounds
    if order.lacks(layers.size):
        known = ", ".join(map(str, divisors(layers.size)[1:]))
        raise LayoutError(
            f"pipeline over {name!r}: {parts} {'virtual ' * (order.rounds > 1)}stages do not divide the "
            f"{layers.size} layers, which is required because an operation outside the loop reads the "
            f"layers' values; choose a total of {known}"
        )
    if lies:
        found = _by_chunks(x, order)
        stages, rounds, *each = found.shape.dims
        found = _turned(transpose(found, [rounds, stages, *each]), order)
        found = slice_dim(found, rounds, 0, order.rounds)
        return reshape(found, [Dim(name, layers.size), *rest])
    dims = (
        Dim(f"{name}_rounds", order.rounds),
        Dim(name, order.stages),
        Dim(layers_of_stage(name), layers.size // parts),
    )
    found = reshape(x, [*dims, *rest])
    return _laid(concat([found] * (1 + order.mirrored), dims[0]), order)


def added(x: Tensor, order: Interleaved) -> Tensor:
    """x, whose first dimension lies in the order of stages, with the sum of both copies of layers in each."""
    if not order.mirrored:
        return x
    found = _by_chunks(x, order)
    other = reduce(lambda y, dim: x.graph.apply(ReverseAlong(dim.name), y), found.shape.dims[:2], found)
    return reshape(found + other, x.shape)


def _by_chunks(x: Tensor, order: Interleaved) -> Tensor:
    """x in the order of stages, as [stages, chunks, layers of a chunk, others]."""
    layers, *rest = x.shape.dims
    rounds, stages = Dim(f"{layers.name}_rounds", order.chunks), Dim(layers.name, order.stages)
    chunk = Dim(layers_of_stage(layers.name), layers.size // (order.stages * order.chunks))
    graph_of(x).unsplit[rounds.name] = "a device holds all chunks of a stage's layers"
    return reshape(x, [stages, rounds, chunk, *rest])


def _laid(x: Tensor, order: Interleaved) -> Tensor:
    """x [chunks, stages, layers of a chunk, others] as `_by_chunks` reads it."""
    rounds, stages, chunk, *rest = x.shape.dims
    graph_of(x).unsplit[rounds.name] = "a device holds all chunks of a stage's layers"
    found = transpose(_turned(x, order), [stages, rounds, chunk, *rest])
    return reshape(found, [Dim(stages.name, stages.size * rounds.size * chunk.size), *rest])


def _turned(x: Tensor, order: Interleaved) -> Tensor:
    """The second chunks of stages in the opposite order, if microbatches pass them so."""
    if not order.turns and not order.mirrored:
        return x
    rounds, stages = x.shape.dims[:2]
    down, up = (slice_dim(x, rounds, number, 1) for number in range(2))
    return concat([down, x.graph.apply(ReverseAlong(stages.name), up)], rounds)
