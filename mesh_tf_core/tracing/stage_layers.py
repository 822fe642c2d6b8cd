"""Loops over layers as stages: which loops can be stages, and the order in which stages with several chunks
store stacks of layers (`ir.stored_order`)."""

from collections.abc import Iterable, Mapping
from functools import reduce

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.dims import Dim, divisors
from mesh_tf_core.ir.outline import per_graph
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import GPIPE, rounds_of
from mesh_tf_core.ir.stored_order import Interleaved
from mesh_tf_core.ir.structure import Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.neighbours import ReverseAlong
from mesh_tf_core.ops.shape import concat, reshape, slice_dim, transpose
from mesh_tf_core.tracing.graph import Graph, graph_of


@per_graph
def loop_dims(graph: Graph) -> Mapping[str, list[Node]]:
    """The dimensions that forward loops run over -> these loops."""
    found: dict[str, list[Node]] = {}
    for node, _ in graph.walk():
        if node.phase == Phase.FORWARD and node.body is not None:
            found.setdefault(node.body.dim.name, []).append(node)
    return found


@per_graph
def backwards(graph: Graph) -> Mapping[int, list[Block]]:
    """Loops, by the numbers of their bodies -> the bodies of their backward."""
    found: dict[int, list[Block]] = {}
    for block in graph.blocks:
        if block.forward is not None:
            found.setdefault(block.forward.id, []).append(block)
    return found


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


def layers_of_stage(dim: str) -> str:
    """The dimension of the loop over the layers of a stage, of those that `dim` counts."""
    return f"{dim}_of_stage"


def loop_name(block: Block, graph: Graph) -> str | None:
    """The name for recomputing a loop: its dimension's, or for the layers of a stage that of all layers,
    whatever their split. None: of stages themselves, which are no loop."""
    if block.parent is None or block.spread:
        return None
    around = graph.outside(block)
    of_stage = around.spread and block.dim.name == layers_of_stage(around.dim.name)
    return around.dim.name if of_stage else block.dim.name


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
