"""Loops over layers as stages: which loops can be stages, and the order in which stages with several chunks
store stacks of layers (`ir.stored_order`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.dims import Dim, divisors
from mesh_tf_core.ir.outline import per_graph
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.stored_order import Interleaved
from mesh_tf_core.ir.structure import Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.shape import reshape, transpose
from mesh_tf_core.tracing.batch_linearity import outer_reads
from mesh_tf_core.tracing.graph import Graph, graph_of


@per_graph
def loop_dims(graph: Graph) -> Mapping[str, list[Node]]:
    """The dimensions that forward loops run over -> these loops."""
    found: dict[str, list[Node]] = {}
    for node, _ in graph.walk():
        if node.phase == Phase.FORWARD and node.body is not None and node.body.dim is not None:
            found.setdefault(node.body.dim.name, []).append(node)
    return found


def check_stages(graph: Graph, dim: str, count: int, rounds: int = 1) -> None:
    """UserError if the loops over a dimension cannot be this many stages, with as many virtual stages as
    rounds."""
    for node in loop_dims(graph)[dim]:
        size = node.body.dim.size if node.body and node.body.dim else 0
        # Embedding and head may be all that the first and the last virtual stage have.
        if count * rounds > size + 2 * (rounds > 1):
            times = f" times {rounds} rounds" if rounds > 1 else ""
            raise UserError(
                f"pipeline over {dim!r}: {count} stages{times} are too many for a loop of {size} "
                f"layer{'s' * (size != 1)}; use fewer stages{' or rounds' * (rounds > 1)}"
            )
        if node not in graph.nodes:
            raise UserError(
                f"pipeline over {dim!r}: this loop is inside another loop; split the outer loop instead"
            )


def layers_of_stage(dim: str) -> str:
    """The dimension of the loop over the layers of a stage, of those that `dim` counts."""
    return f"{dim}_of_stage"


def loop_name(block: Block, graph: Graph) -> str | None:
    """The name for recomputing a loop: its dimension's, or for the layers of a stage that of all layers,
    whatever their split. None: of stages themselves, which are no loop."""
    if block.dim is None or block.spread:
        return None
    around = graph.blocks[block.parent] if block.parent is not None else None
    stage = around.dim.name if around is not None and around.spread and around.dim is not None else ""
    return stage if stage and block.dim.name == layers_of_stage(stage) else block.dim.name


def lying(
    graph: Graph, nodes: Iterable[Node], stages: Mapping[str, int], rounds: int
) -> dict[int, tuple[Interleaved, bool]]:
    """Values of variables that loops read by parts which become stages -> the order in which they are to lie,
    if that is not the model's, and whether any other of the nodes reads them.

    Args:
      stages: dimension of loops -> number of stages.
    """
    found, read = dict[int, Interleaved](), set[int]()
    for node in nodes:
        body = node.body
        if body is None or body.dim is None or body.dim.name not in stages:
            read |= outer_reads(graph, node)
            continue
        read.update(node.inputs, body.carry_out, *(outer_reads(graph, n) for n in body.nodes))
        read.update(i for i, _ in (*body.stacked, *body.summed))
        order = Interleaved(stages[body.dim.name], rounds)
        if not order.moves(body.dim.size):
            read.update(i for i, _ in body.sliced)
            continue
        makers = ((outer, graph.producer.get(outer)) for outer, _ in body.sliced)
        found.update((i, order) for i, maker in makers if maker is not None and isinstance(maker.op, Read))
    return {i: (order, i in read) for i, order in found.items()}


def reordered(x: Tensor, order: Interleaved, layers: Dim, *, lies: bool) -> Tensor:
    """x, whose first dimension counts layers, in the other order.

    Args:
      layers: the dimension as the model has it.
      lies: x has the order of stored variables.

    Raises:
      UserError: virtual stages have different numbers of layers, so nothing else can read the dimension that
        counts them.
    """
    name, rest, parts = layers.name, x.shape.dims[1:], order.stages * order.rounds
    if order.size(layers.size) != layers.size:
        known = ", ".join(map(str, divisors(layers.size)[1:]))
        raise UserError(
            f"pipeline over {name!r}: {parts} {'virtual ' * (order.rounds > 1)}stages do not divide the "
            f"{layers.size} layers, which is required because an operation outside the loop reads the "
            f"layers' values; choose a total of {known}"
        )
    rounds, stages = Dim(f"{name}_rounds", order.rounds), Dim(name, order.stages)
    chunk = Dim(layers_of_stage(name), layers.size // parts)
    graph_of(x).unsplit[rounds.name] = "a device holds all chunks of a stage's layers"
    have, want = ((stages, rounds), (rounds, stages)) if lies else ((rounds, stages), (stages, rounds))
    apart = reshape(x, [*have, chunk, *rest])
    return reshape(transpose(apart, [*want, chunk, *rest]), x.shape)
