"""Base lowering: every node alone, straight from its roles. Passes improve the result afterwards.

A value's natural sharding is given by the layout: every dimension on its axes. An operation's inputs arrive
in default sharding; a dimension that it needs whole is gathered; a dimension that it sums out leaves a
partial result, which is all-reduced at once. `passes` then moves those sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mesh_tf_core.ir.blocks import Assign, Connection, Feed, KnownTensor, Node, Read, Scan
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Input, Local, Origin, Program, ReadVariable, Stored, WriteVariable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower.loops import Loops
from mesh_tf_core.lower.nodes import (
    NodePlan,
    delivered,
    expansion,
    gathered,
    gradient_terms,
    plan_of,
    product_dims,
)
from mesh_tf_core.lower.options import DEFAULT, Options
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.recomputed import recomputed
from mesh_tf_core.lower.storage import BACKWARD, FORWARD, GRADIENT, UPDATE, VARIABLE
from mesh_tf_core.lower.subgraph import GraphPart
from mesh_tf_core.ops.basic import AddN, Cast
from mesh_tf_core.ops.stages import JoinedParts
from mesh_tf_core.tracing.graph import Graph


class Lowering(Loops):
    """The state of one lowering, which visits the nodes of a graph.

    Attributes:
      context: dimension of keys -> the form of attention to them (`Options`).
      collective_matmul: dimensions of products that overlap messages (`Options`).
      returned: tensors that a whole program returns.
    """

    def __init__(
        self,
        graph: Graph,
        oracle: Oracle,
        options: Options = DEFAULT,
        part: GraphPart | None = None,
        results: Collection[Tensor] = (),
    ) -> None:
        step = recomputed(graph, options.recompute)
        super().__init__(graph, oracle, part or GraphPart(step, step.root))
        # The results of a part are all that it makes, whether anything reads them or not.
        self.returned = frozenset(t.id for t in results if not self.part.alone)
        self.context, self.collective_matmul = dict(options.context), options.collective_matmul
        self.feeds: dict[str, int] = {}
        self._terms = gradient_terms(graph)

    def node(self, node: Node) -> None:
        """Lowers one node in the layout at its path; the update of a variable in that of its state."""
        self.origin = Origin(node.index, node.scope, node.phase)
        if isinstance(node.op, KnownTensor):
            (tensor,), (name,) = node.inputs, node.outputs
            self.env[name] = self.value_of(tensor) if node.op.loads else self.lying(tensor)
            return
        plan = plan_of(node, self.graph)
        around = self.layout
        self.lay_out(self._layout_of(node, plan))
        try:
            self._in_layout(node, plan)
        finally:
            self.lay_out(around)
        for tensor in node.outputs if not plan.updates else ():
            if tensor in self._terms and tensor in self.env:
                self._scatter(tensor)

    def _layout_of(self, node: Node, plan: NodePlan) -> Layout:
        """The layout that holds at a node: of an update, and of what adds up terms of a gradient that lie as
        the state does (from stage 2 on), that of the variable's state."""
        row = None
        if plan.updates:
            row = self.oracle.row(VARIABLE, node.scope, UPDATE)
        elif isinstance(node.op, AddN | JoinedParts):
            terms = delivered(self.graph)
            variable = terms.get(node.outputs[0]) if all(i in terms for i in node.inputs) else None
            row = None if variable is None else self.oracle.row(GRADIENT, variable, BACKWARD)
        return self.oracle.layout.at(plan.path) if row is None or row.layout is None else row.layout

    def _scatter(self, tensor: int) -> None:
        """Brings a gradient, or a term of one, to where its row says as soon as it is made: if that is split
        as its variable's state is, a sum over devices is scattered here, and nobody keeps all of it."""
        row = self.oracle.row(GRADIENT, self._terms[tensor], BACKWARD)
        if row.layout is not None:
            scattered = self.reshard(self.env[tensor], row)
            self.values[scattered] = self.values[scattered].of(tensor)

    def _in_layout(self, node: Node, plan: NodePlan) -> None:
        op = node.op
        if not isinstance(op, Connection):
            masters = self.masters if node.phase == Phase.UPDATE else {}
            read = op.operands(node.inputs)
            inputs = [self.on_device(masters[i]) if i in masters else self.value_of(i) for i in read]
            between = self.layout
            if between.elsewhere and not plan.updates and not op.converts:
                # A weight comes to where it lies between operations, once for all who read it, and from there
                # to each: so what it is stored as is nothing to its readers.
                given = zip(read, inputs, strict=True)
                inputs = [self.to_natural(v) if i in self._weights else v for i, v in given]
                for i, v in zip(read, inputs, strict=True):
                    if i in self._weights and self.values[v].tensor < 0:
                        self.values[v] = self.values[v].of(i)  # still a weight to what moves it further
            if not op.exchanges:
                self.lay_out(between.around(plan.dims, plan.regrouped))
            if self.collective_matmul:
                around = product_dims(self.graph).get(node.index, frozenset())
                self.chunked = not self.collective_matmul.isdisjoint(around)
            outs = self.apply(op, inputs, plan, node.outputs)
            self.chunked = False
            if self.layout is not between:
                self.lay_out(between)
                outs = outs if op.converts else [o if o < 0 else self.to_natural(o) for o in outs]
            for tensor, out in zip(node.outputs, outs, strict=True):
                if out >= 0:
                    self.bind(tensor, out)
        elif isinstance(op, Scan):
            self.scan(node)
        elif isinstance(op, Feed):
            (tensor,), (type,) = node.outputs, plan.types
            out = self.new(type, self.natural(type.shape, f"input {op.feed!r}"), tensor=tensor)
            self.emit(Input((), (out,), self.origin, op.feed))
            self.env[tensor] = self.feeds[op.feed] = out
        elif isinstance(op, Read):
            (tensor,), stored = node.outputs, self.stored_as(op.variable).value
            type = TensorType(stored.shape, stored.dtype)
            out = self.new(type, stored.splits, tensor=tensor, host=stored.host)
            self.emit(ReadVariable((), (out,), self.origin, op.variable.name))
            self.bind(tensor, self._half(op.variable, out))
        elif isinstance(op, Assign):
            self.stored_as(op.variable)
            value = self.reshard(self.value_of(node.inputs[0]), self.oracle.stored(op.variable))
            self.emit(WriteVariable((value,), (), self.origin, op.variable.name))

    def _half(self, variable: Variable, master: int) -> int:
        """What forward and backward read of a variable: as it is stored, or of a split master copy (stages 1
        and 2) its half-precision values, made once, before all loops."""
        dtype, v = self.oracle.row(VARIABLE, variable.name, FORWARD).dtype, self.values[master]
        if dtype is None:
            return master
        self.masters[v.tensor] = master
        if self.part.again:
            plain = TensorType(self.plain_type(v).shape, dtype)
            return self.new(plain, self.natural(plain.shape), (), v.tensor)
        half = self.new(TensorType(v.shape, dtype), v.splits, (), v.tensor)
        self.emit(Local((self.on_device(master),), (half,), self.origin, Cast(dtype)))
        return self.to_natural(half)

    def stored_as(self, variable: Variable) -> Stored:
        """The storage of a variable between steps."""
        row = self.oracle.stored(variable)
        type, splits = self.held(row, variable.lying, f"variable {variable.name!r}")
        stored = Stored(variable, splits, row.host, type.shape.padded)
        self.stored[variable.name] = stored
        return stored

    def apply(self, op: Op, inputs: Sequence[int], plan: NodePlan, tensors: Sequence[int]) -> Sequence[int]:
        """Lowers one operation; returns its outputs in default sharding, nothing pending; -1 for unused
        outputs.

        Args:
          tensors: the graph's tensors that the outputs are, -1 for none.
        """
        roles = plan.roles
        if roles is None:
            if op.converts:
                # An update widens its own part of a gradient.
                input = self.to_natural(inputs[0]) if self.origin.phase == Phase.UPDATE else inputs[0]
                return [self._converted(op, input, plan, tensors[0])]
            made = op.lower(self, [self.to_natural(i) for i in inputs], plan.types)
            return [self.to_natural(o) for o in made]
        inputs = [self.to_natural(i) for i in inputs]
        layout, types = self.layout, plan.types
        if layout.padded is not None:
            types = tuple(TensorType(layout.held(t.shape), t.dtype) for t in types)
        reduced = layout.split(roles.reduced) if roles.reduced else []
        self.check_disjoint(op, layout.split(roles.parallel) + reduced)
        if op.crosses and (form := self.context.get(op.crosses[0])):
            wanted = [not self._unread(tensor) for tensor in tensors]
            spread = op.spread(self, inputs, plan.types, form, wanted)
            if spread is not None:
                return [self.to_natural(o) if w else -1 for o, w in zip(spread, wanted, strict=True)]
        whole = layout.split(roles.whole) if roles.whole else []
        if whole and not gathered(op, roles):
            return self._expanded(op, inputs)
        if whole:
            inputs = [self.without(i, whole) for i in inputs]
        gone = ([n for n in reduced if n not in t.shape.names] for t in types)
        lacking = [
            self.oracle.ordered(a for n in ns for a in self.layout.axes(n)) if ns else () for ns in gone
        ]
        in_place, outs = not whole and not any(lacking), []
        for t, axes, tensor in zip(types, lacking, tensors, strict=True):
            splits = self.natural(t.shape)
            if whole:
                splits = tuple(() if n in whole else s for n, s in zip(t.shape.names, splits, strict=True))
            pending = axes if roles.combine == "sum" else ()
            outs.append(self.new(t, splits, pending, tensor if in_place else -1))
        self.emit(Local(tuple(inputs), tuple(outs), self.origin, op))
        if in_place:
            return outs
        joined = (
            self.joined(o, axes, roles.combine) if axes else o for o, axes in zip(outs, lacking, strict=True)
        )
        return [self.to_natural(o) for o in joined]

    def _unread(self, tensor: int) -> bool:
        """Whether nothing reads a tensor, as in the first run of what runs again. (The whole program drops as
        dead what would be done for it.)"""
        if tensor < 0 or tensor in self.returned:
            return False
        block, left = self.body, set(self.body.saved)
        if self.part.alone:
            block = self.graph.blocks[self.graph.tensor(tensor).block]
            left = {*self.part.step.left(block, self.part.again)}
        leaving = (*block.carry_out, *left, *(i for i, _ in block.results))
        return tensor not in leaving and not any(tensor in node.inputs for node in block.nodes)

    def _converted(self, op: Op, input: int, plan: NodePlan, tensor: int) -> int:
        """Done on whatever piece there is: a variable stored split is converted before it is gathered, to
        half the bytes. Once for all who ask before the update; that converts for itself."""
        if self.values[input].dtype == plan.types[0].dtype and (not op.free or tensor in self._weights):
            return input
        known = {} if self.origin.phase == Phase.UPDATE else self.converted
        if (input, op) not in known:
            v = self.values[input]
            known[input, op] = self.new(TensorType(v.shape, plan.types[0].dtype), v.splits, (), tensor)
            self.emit(Local((input,), (known[input, op],), self.origin, op))
        return known[input, op]

    def _expanded(self, op: Op, inputs: Sequence[int]) -> list[int]:
        """Lowers the smaller operations that `op` says it equals."""
        types = tuple(TensorType(self.values[i].shape, self.values[i].dtype) for i in inputs)
        found = expansion(op, types)
        env = dict(zip(found.operands, inputs, strict=True))
        for node, plan in found.nodes:
            outputs = self.apply(node.op, [env[i] for i in node.inputs], plan, (-1,) * len(node.outputs))
            env.update(zip(node.outputs, outputs, strict=True))
        return [env[found.result]]


def lower_base(
    graph: Graph,
    oracle: Oracle,
    results: Mapping[str, Tensor] | None = None,
    options: Options = DEFAULT,
    part: GraphPart | None = None,
) -> Program:
    """Lowers every node alone; see the module's text. LayoutError if the layout is not legal for the
    graph."""
    state = Lowering(graph, oracle, options, part, (results or {}).values())
    state.nodes(state.part.root)
    for tensor, id in state.env.items():
        if tensor >= 0 and state.values[id].tensor != tensor:
            state.values[id] = state.values[id].of(tensor)
    state.env.update(state.masters)
    if state.part.alone:
        # A part returns what it has where that lies: it may be of a loop's body, whose layout is another.
        every = enumerate((*state.before, state.env))
        named = ((at, env, n, t.id) for at, env in every for n, t in (results or {}).items())
        returned = {n + "'" * at: env[t] for at, env, n, t in named if t in env}
    else:
        returned = {n: state.to_natural(state.value_of(t.id)) for n, t in (results or {}).items()}
    return Program(
        oracle.mesh,
        oracle.layout,
        tuple(state.values),
        tuple(state.code),
        dict(state.stored),
        dict(state.feeds),
        returned,
        graph.outline(),
        tuple(state.beside),
    )
