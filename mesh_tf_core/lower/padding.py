"""The dimensions of a variable's state that may be padded, so that any number of devices can share it.

The stored part of a variable is then padded with zeros. Its update works on shards as stored, so it must not
mix elements along that dimension. Element by element, zeros do no harm, because their results are not used; a
sum over the dimension stays the same as long as they are zero (the norm of gradients).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.outline import per_graph
from mesh_tf_core.ir.structure import Connection
from mesh_tf_core.ir.traits import SumRules, distributes
from mesh_tf_core.lower.nodes import plan_of, updated
from mesh_tf_core.tracing.graph import Graph


@per_graph
def paddable(graph: Graph) -> Mapping[str, frozenset[str]]:
    """Variable -> its dimensions that may be padded where it is stored. Nothing is computed on the stored
    part of one that is not trained."""
    nodes = _updates(graph)
    gradients = {name: tensor for tensor, name in graph.gradient_of.items()}
    found = {}
    for name, variable in graph.variables.items():
        if variable.even or not variable.own_storage:
            continue
        if not variable.trainable:
            found[name] = frozenset(variable.shape.names)
        elif name in gradients:
            zero = {gradients[name]}
            found[name] = _alone(nodes[name], zero, frozenset(variable.shape.names), graph)
    return found


def paddable_with(graph: Graph, others: Iterable[Graph]) -> Mapping[str, frozenset[str]]:
    """`paddable`, where other graphs (outer steps of replicas) update the same variables too."""
    found = dict(paddable(graph))
    for other in others:
        nodes = _updates(other)
        for name in found.keys() & nodes.keys():
            found[name] = _alone(nodes[name], set(), found[name], other)
    return found


def _updates(graph: Graph) -> dict[str, list[Node]]:
    """Variable -> the nodes of its update."""
    nodes: dict[str, list[Node]] = defaultdict(list)
    for node, _ in graph.walk():
        owner = updated(node, graph)
        if owner is not None:
            nodes[owner].append(node)
    return nodes


def _alone(nodes: list[Node], zero: set[int], names: frozenset[str], graph: Graph) -> frozenset[str]:
    """Those of some dimensions along which an update works element by element, or adds up zeros.

    Args:
      zero: tensors that are zero where they are padded; grows.
    """
    left = set(names)
    for node in nodes:
        if isinstance(node.op, Connection):
            continue
        plan = plan_of(node, graph)
        if plan.roles is None and not node.op.converts:
            left -= plan.dims
            continue
        keeps = _keeps_zero(node.op, [i in zero for i in node.inputs])
        zero.update(node.outputs if keeps else ())
        if plan.roles is None:
            continue
        sums = plan.roles.reduced if keeps and plan.roles.combine == "sum" else ()
        made = {n for o in node.outputs for n in graph.tensor(o).shape.names}
        given = {n for i in node.inputs for n in graph.tensor(i).shape.names}
        # A new dimension has a size of its own.
        left -= {*plan.roles.whole, *plan.regrouped, *(made - given)}
        left -= {*plan.roles.reduced} - {*sums}
    return frozenset(left)


def _keeps_zero(op: Op, zero: list[bool]) -> bool:
    """Whether a result is zero where those operands are that are known to be."""
    if not any(zero):
        return False
    if (isinstance(op, SumRules) and op.vanishes) or ((op.linear or op.converts) and all(zero)):
        return True
    return any(z and distributes(op, [j != i for j in range(len(zero))]) for i, z in enumerate(zero))
