"""Facts about a node that lowering needs under every layout: computed once, remembered by `Subgraph`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import Assign, Connection, Node, Outline, Read, per_graph
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.context import FORMS
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node.

    Attributes:
      types: of its outputs.
      roles: None if it is not lowered from them: connections, operations that lower themselves, and
        those that convert, which every piece allows.
      updates: it belongs to the update of the variable that its scope names.
      path: its name in rules of a layout; an instruction that reads or stores a variable has the variable's
        name.
      dims: names of all dimensions that it has.
      regrouped: dimensions that only one side of a regrouping has: no rule for elsewhere splits these in
        it, so that a sum is taken after it.
    """

    types: tuple[TensorType, ...]
    roles: Roles | None
    updates: bool
    path: str
    dims: frozenset[str]
    regrouped: frozenset[str]


def updated(node: Node, graph: Graph | Outline) -> str | None:
    """The variable whose update a node belongs to: such nodes are lowered in the layout of its state."""
    return node.scope if node.phase == Phase.UPDATE and node.scope in graph.variables else None


def converts_variable(node: Node) -> bool:
    """True if a node, given a variable or a part of one, makes the same of it that stays where it is stored.
    (Conversions inside the update belong to the update.)"""
    return node.op.converts and node.phase != Phase.UPDATE


@per_graph
def stored_tensors(graph: Graph | Outline) -> Mapping[int, str]:
    """Tensors that are the value of any variable, or parts or casts of it under any name, before the update
    -> the name of one with its own storage, unless the tensor is called otherwise; else ""."""
    found: dict[int, str] = {}
    for node, _ in graph.walk():
        if isinstance(node.op, Read):
            name = node.op.variable.name if node.op.variable.own_storage else ""
        elif converts_variable(node) and node.inputs[0] in found:
            name = found[node.inputs[0]]
        elif node.op.free and node.inputs and node.phase != Phase.UPDATE and found.keys() >= {*node.inputs}:
            name = ""
        else:
            continue
        found.update(dict.fromkeys(with_parts(node.outputs[0], graph), name))
    return found


@per_graph
def weights(graph: Graph | Outline) -> Mapping[int, str]:
    """Tensors that are the value of a variable with its own storage, or parts or casts of it before the
    update -> its name."""
    return {tensor: name for tensor, name in stored_tensors(graph).items() if name}


@per_graph
def _parts(graph: Graph | Outline) -> Mapping[int, list[int]]:
    """Stacks -> the tensors of loop bodies that are an iteration's part of them."""
    found: dict[int, list[int]] = defaultdict(list)
    for outer, inner in (pair for block in graph.blocks for pair in block.sliced):
        found[outer].append(inner)
    return found


def with_parts(tensor: int, graph: Graph | Outline) -> list[int]:
    """A tensor, and what loops have of it by parts."""
    found = [tensor]
    for each in found:
        found += _parts(graph).get(each, ())
    return found


@per_graph
def assigned(graph: Graph | Outline) -> Mapping[str, int]:
    """Variables that the step gives new values -> the tensors of these."""
    return {n.op.variable.name: n.inputs[0] for n, _ in graph.walk() if isinstance(n.op, Assign)}


def pass_of(phase: Phase) -> Phase:
    """The pass that an instruction belongs to: weights are moved once for each."""
    return Phase.FORWARD if phase == Phase.FORWARD else Phase.BACKWARD


@per_graph
def delivered(graph: Graph) -> Mapping[int, str]:
    """Tensors that are a variable's gradient, or one loop's term of it -> the variable."""
    owner = graph.gradient_of
    sums = [n for n in graph.nodes if isinstance(n.op, AddN) and n.outputs[0] in owner]
    ends = {o for n in graph.nodes if n.body is not None for o in n.outputs}
    added = {i: owner[n.outputs[0]] for n in sums if ends.issuperset(n.inputs) for i in n.inputs}
    return {**added, **owner}


@per_graph
def gradient_terms(graph: Graph) -> Mapping[int, str]:
    """Tensors that are a variable's gradient, or that a loop stacks or sums up to one -> the variable. (Sums
    of loops inside that loop are such terms only after these loops have ended.)"""
    owner = delivered(graph)
    ends = ((b, pair) for b in graph.blocks for pair in b.results)
    terms = {i: owner[o] for b, (i, o) in ends if o in owner and graph.tensor(i).block == b.id}
    return {**terms, **owner}


@per_graph
def repeated(graph: Graph | Outline) -> Mapping[int, int]:
    """Tensors that repeat a conversion -> the result of the first conversion of the same tensor in the same
    block: lowering converts once for all readers before the update."""
    first: dict[tuple[int, int, Op], int] = {}
    found: dict[int, int] = {}
    for node, _ in graph.walk():
        if node.op.converts and node.phase != Phase.UPDATE:
            (input,), (output,) = node.inputs, node.outputs
            key = graph.tensor(output).block, found.get(input, input), node.op
            known = first.setdefault(key, output)
            if known != output:
                found[output] = known
    return found


def gathered(op: Op, roles: Roles) -> Iterable[str]:
    """The dimensions that are gathered for an operation where they are split."""
    return () if op.expands() else roles.whole


def moved_dims(node: Node, tensor: int, graph: Graph, further: Collection[str] = frozenset()) -> list[str]:
    """The dimensions of an operand that may be moved for a node, since it needs all of them or calls them
    otherwise; once for all nodes of a block that move the same.

    Args:
      further: dimensions that rules for elsewhere may split: a node that has others than the operand may need
        all of them.
    """
    op, names, own = node.op, graph.tensor(tensor).shape.names, list[str]()
    if not (isinstance(op, Connection) or op.expands()):
        whole = {*gathered(op, op.roles(*(graph.tensor(i).type for i in node.inputs))), *op.crosses}
        stay = {n for o in node.outputs for n in graph.tensor(o).shape.names}
        own = [n for n in names if n in whole or (op.regroups and n not in stay)]
    between = [n for n in names if n in further] if further else []
    if between and not isinstance(op, Connection) and not plan_of(node, graph).dims <= {*names}:
        return [*between, *(n for n in own if n not in between)]
    return own


@per_graph
def crossed(graph: Graph) -> tuple[str, ...]:
    """The dimensions that forms of attention are chosen for."""
    return tuple(dict.fromkeys(n for node, _ in graph.walk() for n in node.op.crosses[:1]))


def check_context(graph: Graph, context: Mapping[str, str]) -> None:
    """UserError if a form is unknown, or its dimension is not one of keys."""
    for name, form in context.items():
        if form not in FORMS:
            raise UserError(f"context {name}={form}: unknown form {form!r}; {known_names(form, FORMS)}")
        if name not in crossed(graph):
            keys = ", ".join(map(repr, crossed(graph))) or "none"
            raise UserError(
                f"context {name}={form}: no fused attention has keys along {name!r}; dimensions of keys "
                f"in this model: {keys}"
            )


def is_product(op: Op, operands: Sequence[int]) -> bool:
    """True if the gathers of an operation's inputs, and the scatters of its results, may overlap it in
    chunks."""
    return isinstance(op, Einsum) and op.needed > 0 and len(operands) == 2


@per_graph
def product_dims(graph: Graph) -> Mapping[int, frozenset[str]]:
    """Node -> the dimensions of products of two operands that it is, or whose renamed result it reads."""
    found: dict[int, frozenset[str]] = {}
    for node, _ in graph.walk():
        if is_product(node.op, node.inputs):
            dims = found[node.index] = plan_of(node, graph).dims
            for i in node.inputs:
                maker = graph.producer.get(i)
                while maker is not None and maker.op.renames and maker.op.free:
                    found[maker.index] = found.get(maker.index, frozenset()) | dims
                    maker = graph.producer.get(maker.inputs[0])
    return found


def check_products(graph: Graph, dims: Iterable[str]) -> None:
    """UserError if no product of two operands has a dimension of collective matmul."""
    known = sorted({name for found in product_dims(graph).values() for name in found})
    for dim in dims:
        if dim not in known:
            raise UserError(
                f"collective matmul of {dim!r}: no matrix product has this dimension; "
                f"{known_names(dim, known)}"
            )


def plan_of(node: Node, graph: Graph) -> NodePlan:
    """The plan of a node of a graph, made once: a search lowers the same nodes under thousands of layouts."""
    plans: dict[int, NodePlan] = graph.remembered(plan_of, dict)
    plan = plans.get(node.index)
    if plan is None:
        plan = plans[node.index] = _plan(node, graph)
    return plan


def _plan(node: Node, graph: Graph) -> NodePlan:
    op, operands = node.op, [graph.tensor(i).type for i in node.inputs]
    other = isinstance(op, Connection) or op.lowers() or op.converts
    roles = None if other else _roles(op, tuple((t.shape, t.dtype) for t in operands))
    worked = (*roles.parallel, *roles.reduced, *roles.whole) if roles else ()
    before, after = (
        {n for i in ids for n in graph.tensor(i).shape.names} for ids in (node.inputs, node.outputs)
    )
    return NodePlan(
        tuple(graph.tensor(o).type for o in node.outputs),
        roles,
        updated(node, graph) is not None,
        op.variable.name if isinstance(op, Read | Assign) else node.path,
        frozenset((*worked, *before, *after)),
        frozenset(before ^ after if op.regroups else ()),
    )


@lru_cache(maxsize=1 << 14)
def _roles(op: Op, operands: tuple[tuple[Shape, str], ...]) -> Roles:
    """The roles of an operation on operands of these types: a graph has many equal ones."""
    found = op.roles(*(TensorType(shape, dtype) for shape, dtype in operands))
    if not isinstance(found, Roles):
        raise TypeError(f"operation {type(op).__name__}: roles returned {found!r}; it must return mtf.Roles")
    return found


@dataclass(frozen=True, slots=True)
class Expansion:
    """The smaller operations that an operation equals.

    Attributes:
      operands, result: tensors of the nodes.
    """

    operands: tuple[int, ...]
    nodes: tuple[tuple[Node, NodePlan], ...]
    result: int


@lru_cache(maxsize=1 << 12)
def expansion(op: Op, types: tuple[TensorType, ...]) -> Expansion:
    """The expansion `op.expand` of operands of these types."""
    scratch = Graph(op.name)
    handles = [scratch.new_tensor(t, scratch.blocks[0]) for t in types]
    result = op.expand(*handles)
    assert isinstance(result, Tensor)
    nodes = tuple((node, plan_of(node, scratch)) for node in scratch.nodes)
    return Expansion(tuple(h.id for h in handles), nodes, result.id)
