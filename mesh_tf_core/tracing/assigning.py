"""Storing a variable changed by something, or a part of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Assign, Connection, Node, Read, reads
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.index import Range
from mesh_tf_core.ops.math import logical_and
from mesh_tf_core.ops.shape import pad, transpose
from mesh_tf_core.tracing.graph import Graph


def as_updates(graph: Graph) -> None:
    """Makes what computes an array's new value from stored arrays alone, element by element, a part of the
    update: it is lowered on the shards in which the array is stored, as an optimizer's update is."""
    readers: dict[int, set[int]] = defaultdict(set)
    for node, _ in graph.walk():
        for i in reads(node):
            readers[i].add(node.index)
    ends = [(n, n.op.variable) for n in graph.nodes if isinstance(n.op, Assign) and n.phase == Phase.FORWARD]
    for end, variable in ends:
        found = _from_stored(end, variable, graph) if variable.own_storage else {}
        if len(found) > 1 and all(readers[o] <= found.keys() for n in found.values() for o in n.outputs):
            moved = {i: replace(n, phase=Phase.UPDATE, scope=variable.name) for i, n in found.items()}
            graph.blocks[0].nodes = [moved.get(n.index, n) for n in graph.nodes]
            graph.producer.update({o: n for n in moved.values() for o in n.outputs})
    graph.changed()


def _from_stored(end: Node, variable: Variable, graph: Graph) -> dict[int, Node]:
    """The nodes that lead from stored arrays and scalars to an assignment; none if there are others."""
    found, waiting = {end.index: end}, [*end.inputs]
    while waiting:
        tensor = waiting.pop()
        node = graph.producer.get(tensor)
        if not graph.tensor(tensor).shape or (node is not None and isinstance(node.op, Read)):
            continue
        if node is None or isinstance(node.op, Connection):
            return {}
        roles = node.op.roles(*(graph.tensor(i).type for i in node.inputs))
        if {*roles.whole, *roles.reduced} or {*roles.parallel} != {*variable.shape.names}:
            return {}
        found[node.index] = node
        waiting += node.inputs
    return found


def assign_add(graph: Graph, variable: Variable, value: Tensor) -> None:
    """Adds `value` to the variable at the end of the step."""
    graph.assign(variable, graph.read(variable) + value)


def assign_sub(graph: Graph, variable: Variable, value: Tensor) -> None:
    """Subtracts `value` from the variable at the end of the step."""
    graph.assign(variable, graph.read(variable) - value)


def assign_slice(graph: Graph, variable: Variable, value: Tensor, dim: Dim | str, begin: int) -> None:
    """Stores `value` as the elements of the variable from `begin` on along `dim`, at the end of the step.

    Args:
      value: tensor with the variable's dimensions and fewer elements along `dim`.
    """
    name = dim.name if isinstance(dim, Dim) else dim
    whole, size = variable.shape.dim(name), value.shape.dim(name).size
    if begin < 0 or begin + size > whole.size:
        raise UserError(
            f"assign to variable {variable.name!r}: elements {begin} to {begin + size - 1} of {name!r} "
            f"are outside the range 0 to {whole.size - 1}"
        )
    moved = pad(value, name, begin, whole.size - begin - size)
    place = graph.apply(Range(whole, "int32"))
    inside = logical_and(place >= begin, place < begin + size)
    graph.assign(variable, transpose(where(inside, moved, graph.read(variable)), variable.shape))
