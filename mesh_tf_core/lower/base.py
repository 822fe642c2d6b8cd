"""Base lowering: every node alone, straight from its roles. Passes improve the result afterwards.

A value's natural placement is given by the layout: every dimension on its axes. An operation's inputs come in
natural placement; a dimension that it needs whole is gathered; a dimension that it sums out leaves a partial
result, which is all-reduced at once. `passes` then moves those sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.layout import Axes, Layout, check_disjoint
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Input,
    Instr,
    Local,
    Origin,
    Program,
    ReadVariable,
    Slice,
    Stored,
    Value,
    WriteVariable,
)
from mesh_tf_core.ir.structure import Assign, Feed, Read, Scan
from mesh_tf_core.lower.loops import Loops
from mesh_tf_core.lower.nodes import Plan, expansion, plan_of
from mesh_tf_core.lower.oracle import Facts
from mesh_tf_core.lower.subgraph import Keep
from mesh_tf_core.ops.basic import Cast
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.tensor import Tensor

Splits = tuple[Axes, ...]
STRUCTURE = (Scan, Feed, Read, Assign)


class Lowering:
    """The state of one lowering: values so far, the code of the block being lowered, where tensors are."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        layout: Layout,
        storage: Mapping[str, int] | None = None,
        recompute: Iterable[str] = (),
        keep: Keep | None = None,
        facts: Facts | None = None,
    ) -> None:
        self.graph, self.mesh, self.layout, self.keep = graph, mesh, layout, keep
        self.facts = facts or Facts(mesh, layout, graph.variables, storage or {})
        self.recompute = frozenset(recompute)
        self.values: list[Value] = []
        self.code: list[Instr] = []
        self.env: dict[int, int] = {}
        self.stored: dict[str, Stored] = {}
        self.feeds: dict[str, int] = {}
        self.origin = Origin(-1, "", "forward")
        self._placements: dict[Layout, dict[Shape, Splits]] = {}
        self._lay_out(layout)
        self.moved: dict[tuple[int, Splits], int] = {}
        self.cast: dict[tuple[int, str], int] = {}
        self._plans: dict[int, Plan] = {} if keep is None else keep.plans
        self.loops = Loops(self)
        self._again = False

    # -- values ----------------------------------------------------------------------------------------------

    def natural(self, shape: Shape, what: str = "", layout: Layout | None = None) -> Splits:
        """The placement that the layout gives a shape; LayoutError if it is not legal.

        Args:
          layout: instead of the one in force (updates of a variable that is stored split have their own).
        """
        known = self._here if layout is None else self._placements.setdefault(layout, {})
        splits = known.get(shape)
        if splits is None:
            splits = known[shape] = self._legal(shape, self.layout if layout is None else layout, what)
        return splits

    def _legal(self, shape: Shape, rules: Layout, what: str) -> Splits:
        splits = rules.axes_of(shape.names)
        if not any(splits):
            return splits
        used = [a for axes in splits for a in axes]
        if len(set(used)) < len(used):
            rules.splits(shape, what or f"a tensor [{shape}]")
        for d, axes in zip(shape.dims, splits, strict=True):
            if axes and not self.facts.divides(d, axes):
                ways = self.mesh.group_size(axes)
                raise LayoutError(
                    f"{what or f'a tensor [{shape}]'}: dimension {d.name!r} has size {d.size}, which the "
                    f"{ways} devices of {'+'.join(axes)} do not divide; use a multiple of {ways}, or do not "
                    "split it"
                )
        return splits

    def new(self, type: TensorType, splits: Splits, partial: Axes = (), tensor: int = -1) -> int:
        values = self.values
        id = len(values)
        values.append(Value(id, type.shape, type.dtype, splits, partial, tensor))
        return id

    def like(self, value: Value, splits: Splits, partial: Axes = ()) -> int:
        """A new value of the same type."""
        id = len(self.values)
        self.values.append(Value(id, value.shape, value.dtype, splits, partial))
        return id

    def bind(self, tensor: int, value: int) -> None:
        """Notes the value of a tensor, and in the value whose it is: computed again, a tensor has two."""
        self.env[tensor] = value
        if self.values[value].tensor != tensor:
            self.values[value] = self.values[value].of(tensor)

    def emit(self, instr: Instr) -> None:
        self.code.append(instr)

    def value_of(self, tensor: int) -> int:
        """The value of a tensor; one that nobody computes here (see `Keep`) is taken as given."""
        value = self.env.get(tensor)
        if value is None:
            value = self.env[tensor] = self._given(tensor)
        return value

    def _given(self, tensor: int) -> int:
        assert self.keep is not None, f"tensor %{tensor} is used before it is computed"
        t, maker = self.graph.tensor(tensor), self.graph.producer.get(tensor)
        splits = self.natural(t.shape)
        if maker is not None and isinstance(maker.op, Cast) and maker.inputs[0] in self.env:
            # A cast leaves a variable where it is stored, also one that is lowered elsewhere.
            splits = self.values[self.env[maker.inputs[0]]].splits
        return self.new(t.type, splits, (), tensor)

    def placed(self, id: int, splits: Splits) -> int:
        """The value with other splits; moved once however many read it there."""
        if self.values[id].splits == splits:
            return id
        if (id, splits) not in self.moved:
            self.moved[id, splits] = self._move(id, splits)
        return self.moved[id, splits]

    def _move(self, id: int, splits: Splits) -> int:
        shape = self.values[id].shape
        for move in self.facts.moves(self.values[id].splits, splits, shape.sizes):
            v = self.values[id]
            name, now = v.shape.names[move.dim], list(v.splits)
            if move.kind == "slice":
                now[move.dim] = (*now[move.dim], *move.axes)
                out = self.like(v, tuple(now), v.partial)
                self.emit(Slice((id,), (out,), self.origin, name, move.axes))
            elif move.kind == "gather":
                now[move.dim] = now[move.dim][: -len(move.axes)]
                out = self.like(v, tuple(now), v.partial)
                self.emit(AllGather((id,), (out,), self.origin, move.axes, name))
            else:
                source = v.shape.names[move.source]
                now[move.source] = now[move.source][: -len(move.axes)]
                now[move.dim] = (*now[move.dim], *move.axes)
                out = self.like(v, tuple(now), v.partial)
                self.emit(AllToAll((id,), (out,), self.origin, move.axes, name, source))
            id = out
        return id

    def at_home(self, id: int) -> int:
        """The value in its natural placement."""
        v = self.values[id]
        if self._here.get(v.shape) == v.splits:
            return id
        return self.placed(id, self.natural(v.shape))

    def local(
        self, op: Op, inputs: Sequence[int], types: Sequence[TensorType], splits: Sequence[Splits]
    ) -> list[int]:
        outs = [self.new(t, s) for t, s in zip(types, splits, strict=True)]
        self.emit(Local(tuple(inputs), tuple(outs), self.origin, op))
        return outs

    # -- nodes -----------------------------------------------------------------------------------------------

    def node(self, node: Node, again: bool = False) -> None:
        """Lowers one node; `again` when a forward node runs a second time, for backward."""
        plan = self._plans.get(node.index)
        if plan is None:
            plan = self._plans[node.index] = plan_of(node, self.graph)
        saved, self._again = self._again, again or self._again
        self.origin = plan.again if self._again else plan.first
        if plan.updates:
            self._update(node, plan)
        else:
            self._in_layout(node, plan)
        self._again = saved

    def _update(self, node: Node, plan: Plan) -> None:
        """A node of the update of a variable, in the layout of this variable's state."""
        saved = self.layout
        self._lay_out(self.facts.view(node.scope))
        try:
            self._in_layout(node, plan)
        finally:
            self._lay_out(saved)

    def _lay_out(self, layout: Layout) -> None:
        """Puts a layout in force."""
        self.layout, self._here = layout, self._placements.setdefault(layout, {})

    def _in_layout(self, node: Node, plan: Plan) -> None:
        op = node.op
        if not isinstance(op, STRUCTURE):
            inputs = [self.value_of(i) for i in node.inputs]
            outs = self.apply(op, inputs, plan, node.outputs)
            for tensor, out in zip(node.outputs, outs, strict=True):
                self.bind(tensor, out)
        elif isinstance(op, Scan):
            self.loops.loop(node)
        elif isinstance(op, Feed):
            (tensor,), (type,) = node.outputs, plan.types
            out = self.new(type, self.natural(type.shape, f"input {op.feed!r}"), tensor=tensor)
            self.emit(Input((), (out,), self.origin, op.feed))
            self.env[tensor] = self.feeds[op.feed] = out
        elif isinstance(op, Read):
            (tensor,), (type,) = node.outputs, plan.types
            out = self.env[tensor] = self.new(type, self.stored_splits(op), tensor=tensor)
            self.emit(ReadVariable((), (out,), self.origin, op.variable.name))
        elif isinstance(op, Assign):
            value = self.placed(self.value_of(node.inputs[0]), self.stored_splits(op))
            self.emit(WriteVariable((value,), (), self.origin, op.variable.name))

    def stored_splits(self, op: Read | Assign) -> Splits:
        variable = op.variable
        layout = self.facts.stored(variable)
        splits = self.natural(variable.shape, f"variable {variable.name!r}", layout)
        self.stored[variable.name] = Stored(variable, splits)
        return splits

    def apply(self, op: Op, inputs: Sequence[int], plan: Plan, tensors: Sequence[int]) -> Sequence[int]:
        """Lowers one operation; returns its outputs in natural placement, nothing pending.

        Args:
          tensors: the graph's tensors that the outputs are, -1 for none.
        """
        roles = plan.roles
        if roles is None:
            if isinstance(op, Cast):
                return [self._cast(op, inputs[0], plan, tensors[0])]
            made = op.lower(self, [self.at_home(i) for i in inputs], plan.types)  # type: ignore[attr-defined]
            return [self.at_home(o) for o in made]
        inputs = [self.at_home(i) for i in inputs]
        layout = self.layout
        reduced = layout.split(roles.reduced) if roles.reduced else []
        self.check_disjoint(op, layout.split(roles.parallel) + reduced)
        whole = layout.split(roles.whole) if roles.whole else []
        if whole and op.expands():
            return self._expanded(op, inputs)
        if whole:
            inputs = [self.without(i, whole) for i in inputs]
        partial = self.facts.ordered(a for n in reduced for a in layout.axes(n)) if reduced else ()
        if not whole and not partial:
            # What comes out is in its place.
            outs = [
                self.new(t, self.natural(t.shape), (), tensor)
                for t, tensor in zip(plan.types, tensors, strict=True)
            ]
            self.emit(Local(tuple(inputs), tuple(outs), self.origin, op))
            return outs
        pending = partial if roles.combine == "sum" else ()
        outs = []
        for t in plan.types:
            splits = self.natural(t.shape)
            if whole:
                splits = tuple(() if n in whole else s for n, s in zip(t.shape.names, splits, strict=True))
            outs.append(self.new(t, splits, pending))
        self.emit(Local(tuple(inputs), tuple(outs), self.origin, op))
        if partial:
            outs = [self.joined(o, partial, roles.combine) for o in outs]
        return [self.at_home(o) for o in outs]

    def _cast(self, op: Cast, input: int, plan: Plan, tensor: int) -> int:
        """A cast is cheap on any piece: a variable stored split is cast before it is gathered, at half the
        bytes."""
        key = (input, op.dtype)
        if key not in self.cast:
            self.cast[key] = self.new(plan.types[0], self.values[input].splits, (), tensor)
            self.emit(Local((input,), (self.cast[key],), self.origin, op))
        return self.cast[key]

    def check_disjoint(self, op: Op, names: Iterable[str]) -> None:
        """LayoutError if two of an operation's dimensions are split over the same axis."""
        used = [a for axes in self.layout.axes_of(names) for a in axes]
        if len(set(used)) < len(used):
            check_disjoint({n: self.layout.axes(n) for n in names}, f"{op.name}{self._where()}")

    def _where(self) -> str:
        return f" in {self.origin.scope!r}" if self.origin.scope else ""

    def without(self, id: int, whole: Iterable[str]) -> int:
        """The value with the dimensions `whole` gathered."""
        v = self.values[id]
        return self.placed(
            id, tuple(() if n in whole else s for n, s in zip(v.shape.names, v.splits, strict=True))
        )

    def joined(self, id: int, axes: Axes, combine: str) -> int:
        """All-reduces a value."""
        v = self.values[id]
        if v.dtype == "bool":
            number = self.local(Cast("int32"), [id], [TensorType(v.shape, "int32")], [v.splits])[0]
            joined = self.joined(number, axes, combine)
            return self.local(Cast("bool"), [joined], [TensorType(v.shape, "bool")], [v.splits])[0]
        out = self.like(v, v.splits)
        self.emit(AllReduce((id,), (out,), self.origin, axes, combine))
        return out

    def _expanded(self, op: Op, inputs: Sequence[int]) -> list[int]:
        """Lowers the smaller operations that `op` says it equals."""
        types = tuple(TensorType(self.values[i].shape, self.values[i].dtype) for i in inputs)
        found = expansion(op, types)
        env = dict(zip(found.operands, inputs, strict=True))
        for node, plan in found.nodes:
            outputs = self.apply(node.op, [env[i] for i in node.inputs], plan, (-1,) * len(node.outputs))
            env.update(zip(node.outputs, outputs, strict=True))
        return [env[found.result]]

    def nodes(self, block: Block) -> None:
        for node in block.nodes if self.keep is None else self.keep.within(block):
            self.node(node)
        for tensor in self.keep.brought_home(block) if self.keep else ():
            self.at_home(self.value_of(tensor))

    def deliver_gradients(self) -> None:
        """Brings the gradients that were lowered here to where the update of their variables wants them."""
        gradient_of = self.graph.gradient_of
        for tensor in [t for t in gradient_of if t in self.env]:
            variable = gradient_of[tensor]
            if not self.graph.tensor(tensor).block and self.facts.stage(variable, 1):
                value, view = self.env[tensor], self.facts.view(variable)
                # The update asks for it: a sum that only the update reads may travel with others.
                self.origin = Origin(self.origin.node, variable, "update")
                self.placed(value, self.natural(self.values[value].shape, layout=view))


def lower_base(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    results: Mapping[str, Tensor] | None = None,
    storage: Mapping[str, int] | None = None,
    recompute: Iterable[str] = (),
    keep: Keep | None = None,
    facts: Facts | None = None,
) -> Program:
    """Lowers every node alone; see the module's text. LayoutError if the layout is not legal for the
    graph."""
    state = Lowering(graph, mesh, layout, storage, recompute, keep, facts)
    state.nodes(graph.blocks[0])
    if keep is not None:
        state.deliver_gradients()
    for tensor, id in state.env.items():
        if state.values[id].tensor != tensor:
            state.values[id] = state.values[id].of(tensor)
    # A part of a graph returns what it has.
    wanted = ((n, t.id) for n, t in (results or {}).items() if keep is None or t.id in state.env)
    returned = {name: state.at_home(state.value_of(tensor)) for name, tensor in wanted}
    return Program(
        mesh,
        layout,
        tuple(state.values),
        tuple(state.code),
        dict(state.stored),
        dict(state.feeds),
        returned,
        graph,
    )
