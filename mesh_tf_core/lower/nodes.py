"""What lowering must know of a node under every layout: worked out once, remembered by `Keep`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.program import Origin
from mesh_tf_core.ir.structure import Connection
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True, slots=True)
class Plan:
    """One node.

    Attributes:
      first, again: where its instructions come from; `again` when it runs a second time, for backward.
      types: of its outputs.
      roles: None if it is not lowered from them: connections, operations that lower themselves, and
        those that convert, which every piece allows.
      updates: it belongs to the update of the variable that its scope names.
    """

    first: Origin
    again: Origin
    types: tuple[TensorType, ...]
    roles: Roles | None
    updates: bool


def plan_of(node: Node, graph: Graph) -> Plan:
    """The plan of a node of a graph."""
    op, operands = node.op, [graph.tensor(i).type for i in node.inputs]
    other = isinstance(op, Connection) or op.lowers() or op.converts
    return Plan(
        Origin(node.index, node.scope, node.phase),
        Origin(node.index, node.scope, "recompute"),
        tuple(graph.tensor(o).type for o in node.outputs),
        None if other else _roles(op, tuple((t.shape, t.dtype) for t in operands)),
        node.phase == "update" and node.scope in graph.variables,
    )


@lru_cache(maxsize=1 << 14)
def _roles(op: Op, operands: tuple[tuple[Shape, str], ...]) -> Roles:
    """The roles of an operation on operands of these types: a graph has many equal ones."""
    return op.roles(*(TensorType(shape, dtype) for shape, dtype in operands))


@dataclass(frozen=True, slots=True)
class Expansion:
    """The smaller operations that an operation equals.

    Attributes:
      operands, result: tensors of the nodes.
    """

    operands: tuple[int, ...]
    nodes: tuple[tuple[Node, Plan], ...]
    result: int


@lru_cache(maxsize=1 << 12)
def expansion(op: Op, types: tuple[TensorType, ...]) -> Expansion:
    """What `op.expand` makes of operands of these types."""
    scratch = Graph(op.name)
    handles = [scratch.new_tensor(t, scratch.blocks[0]) for t in types]
    result = op.expand(*handles)
    assert isinstance(result, Tensor)
    nodes = tuple((node, plan_of(node, scratch)) for node in scratch.nodes)
    return Expansion(tuple(h.id for h in handles), nodes, result.id)
