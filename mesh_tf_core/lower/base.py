"""Base lowering: every node alone, straight from its roles. Passes improve the result afterwards.

A value's natural placement is given by the layout: every dimension on its axes. An operation's inputs come in
natural placement; a dimension that it needs whole is gathered; a dimension that it sums out leaves a partial
result, which is all-reduced at once. `passes` then moves those sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mesh_tf_core.blocks import Block, Node
from mesh_tf_core.dims import Shape
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.graph import Graph
from mesh_tf_core.layout import Axes, Layout, check_disjoint
from mesh_tf_core.lower.redistribute import plan_moves
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.op import Op, TensorType
from mesh_tf_core.ops.basic import Cast
from mesh_tf_core.program import (
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
    make_loop,
)
from mesh_tf_core.structure import Assign, Feed, Read, Scan
from mesh_tf_core.tensor import Tensor

Splits = tuple[Axes, ...]


@dataclass(frozen=True)
class Keep:
    """Lowers only these nodes (by index); what others compute is taken as given, in natural placement."""

    nodes: frozenset[int]
    blocks: frozenset[int]


class Lowering:
    """The state of one lowering: values so far, the code of the block being lowered, where tensors are."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        layout: Layout,
        storage: Mapping[str, Splits] | None = None,
        recompute: Iterable[str] = (),
        keep: Keep | None = None,
    ) -> None:
        self.graph, self.mesh, self.layout, self.keep = graph, mesh, layout, keep
        self.storage = dict(storage or {})
        self.recompute = frozenset(recompute)
        self.values: list[Value] = []
        self.code: list[Instr] = []
        self.env: dict[int, int] = {}
        self.stored: dict[str, Stored] = {}
        self.feeds: dict[str, int] = {}
        self.origin = Origin(-1, "", "forward")
        self._natural: dict[Shape, Splits] = {}
        self._carry_stacks: dict[int, list[int]] = {}

    # -- values ----------------------------------------------------------------------------------------------

    def natural(self, shape: Shape, what: str = "") -> Splits:
        """The placement that the layout gives a shape; LayoutError if it is not legal."""
        if shape not in self._natural:
            name = what or f"a tensor [{shape}]"
            splits = self.layout.splits(shape, name)
            for d, axes in zip(shape, splits, strict=True):
                ways = self.mesh.group_size(axes)
                if d.size % ways:
                    raise LayoutError(
                        f"{name}: dimension {d.name!r} has size {d.size}, which the {ways} devices of "
                        f"{'+'.join(axes)} do not divide; use a multiple of {ways}, or do not split it"
                    )
            self._natural[shape] = splits
        return self._natural[shape]

    def new(self, type: TensorType, splits: Splits, partial: Axes = ()) -> int:
        self.values.append(Value(len(self.values), type.shape, type.dtype, splits, partial))
        return len(self.values) - 1

    def emit(self, instr: Instr) -> None:
        self.code.append(instr)

    def value_of(self, tensor: int) -> int:
        """The value of a tensor; one that nobody computes here (see `Keep`) is taken as given."""
        if tensor not in self.env:
            assert self.keep is not None, f"tensor %{tensor} is used before it is computed"
            t = self.graph.tensor(tensor)
            self.env[tensor] = self.new(t.type, self.natural(t.shape))
        return self.env[tensor]

    def placed(self, id: int, splits: Splits) -> int:
        """The value with other splits."""
        for move in plan_moves(self.values[id].splits, splits):
            v = self.values[id]
            name, now = v.shape.names[move.dim], list(v.splits)
            if move.kind == "slice":
                now[move.dim] = (*now[move.dim], *move.axes)
                out = self.new(TensorType(v.shape, v.dtype), tuple(now), v.partial)
                self.emit(Slice((id,), (out,), self.origin, name, move.axes))
            elif move.kind == "gather":
                now[move.dim] = now[move.dim][: -len(move.axes)]
                out = self.new(TensorType(v.shape, v.dtype), tuple(now), v.partial)
                self.emit(AllGather((id,), (out,), self.origin, move.axes, name))
            else:
                source = v.shape.names[move.source]
                now[move.source] = now[move.source][:-1]
                now[move.dim] = (*now[move.dim], *move.axes)
                out = self.new(TensorType(v.shape, v.dtype), tuple(now), v.partial)
                self.emit(AllToAll((id,), (out,), self.origin, move.axes, name, source))
            id = out
        return id

    def at_home(self, id: int) -> int:
        """The value in its natural placement."""
        return self.placed(id, self.natural(self.values[id].shape))

    def local(
        self, op: Op, inputs: Sequence[int], types: Sequence[TensorType], splits: Sequence[Splits]
    ) -> list[int]:
        outs = [self.new(t, s) for t, s in zip(types, splits, strict=True)]
        self.emit(Local(tuple(inputs), tuple(outs), self.origin, op))
        return outs

    # -- nodes -----------------------------------------------------------------------------------------------

    def node(self, node: Node) -> None:
        self.origin = Origin(node.index, node.scope, node.phase)
        op = node.op
        if isinstance(op, Scan):
            self.loop(node)
        elif isinstance(op, Feed):
            t = self.graph.tensor(node.outputs[0])
            out = self.new(t.type, self.natural(t.shape, f"input {op.feed!r}"))
            self.emit(Input((), (out,), self.origin, op.feed))
            self.env[t.id] = self.feeds[op.feed] = out
        elif isinstance(op, Read):
            self.env[node.outputs[0]] = self.read(op)
        elif isinstance(op, Assign):
            value = self.placed(self.value_of(node.inputs[0]), self.stored_splits(op))
            self.emit(WriteVariable((value,), (), self.origin, op.variable.name))
        else:
            inputs = [self.value_of(i) for i in node.inputs]
            types = [self.graph.tensor(o).type for o in node.outputs]
            for tensor, out in zip(node.outputs, self.apply(op, inputs, types), strict=True):
                self.env[tensor] = out

    def stored_splits(self, op: Read | Assign) -> Splits:
        variable = op.variable
        splits = self.storage.get(variable.name) or self.natural(
            variable.shape, f"variable {variable.name!r}"
        )
        self.stored[variable.name] = Stored(variable, splits)
        return splits

    def read(self, op: Read) -> int:
        out = self.new(op.variable.type, self.stored_splits(op))
        self.emit(ReadVariable((), (out,), self.origin, op.variable.name))
        return out

    def apply(self, op: Op, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Lowers one operation; returns its outputs in natural placement, nothing pending."""
        override = getattr(op, "lower", None)
        inputs = [self.at_home(i) for i in inputs]
        if override is not None:
            return [self.at_home(o) for o in override(self, inputs, types)]
        roles = op.roles(*(TensorType(self.values[i].shape, self.values[i].dtype) for i in inputs))
        axes_of = {n: self.layout.axes(n) for n in (*roles.parallel, *roles.reduced)}
        check_disjoint(axes_of, f"{op.name}{self._where()}")
        if op.expands() and any(self.layout.axes(n) for n in roles.whole):
            return self.expanded(op, inputs)
        inputs = [self.without(i, roles.whole) for i in inputs]
        partial = tuple(a for a in self.mesh.names if any(a in axes_of[n] for n in roles.reduced))
        outs = []
        for t in types:
            splits = tuple(
                () if n in roles.whole else s
                for n, s in zip(t.shape.names, self.natural(t.shape), strict=True)
            )
            outs.append(self.new(t, splits, partial if roles.combine == "sum" else ()))
        self.emit(Local(tuple(inputs), tuple(outs), self.origin, op))
        if partial:
            outs = [self.joined(o, partial, roles.combine) for o in outs]
        return [self.at_home(o) for o in outs]

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
        out = self.new(TensorType(v.shape, v.dtype), v.splits)
        self.emit(AllReduce((id,), (out,), self.origin, axes, combine))
        return out

    def expanded(self, op: Op, inputs: Sequence[int]) -> list[int]:
        """Lowers the smaller operations that `op` says it equals."""
        types = tuple(TensorType(self.values[i].shape, self.values[i].dtype) for i in inputs)
        scratch = Graph(op.name)
        handles = [scratch.new_tensor(t, scratch.blocks[0]) for t in types]
        result = op.expand(*handles)
        assert isinstance(result, Tensor)
        env = {h.id: i for h, i in zip(handles, inputs, strict=True)}
        for node in scratch.nodes:
            taken = [env[i] for i in node.inputs]
            made = self.apply(node.op, taken, [scratch.tensor(o).type for o in node.outputs])
            env.update(zip(node.outputs, made, strict=True))
        return [env[result.id]]

    # -- loops -----------------------------------------------------------------------------------------------

    def loop(self, node: Node) -> None:
        block, origin = node.body, self.origin
        assert block is not None and block.dim is not None
        if self.layout.axes(block.dim.name):
            raise LayoutError(
                f"layout {self.layout}: {block.dim.name!r} counts the iterations of a loop and cannot "
                f"be split over {'+'.join(self.layout.axes(block.dim.name))}; drop this rule"
            )
        whole = self.keep is None or node.index in self.keep.nodes
        inputs, starts = (node.inputs, block.carry_in) if whole else ((), ())
        init = [self.at_home(self.value_of(i)) for i in inputs]
        outer_code, self.code = self.code, []
        index = self.new(self.graph.tensor(block.index).type, ())  # type: ignore[arg-type]
        self.env[block.index] = index  # type: ignore[index]
        carry_in = []
        for tensor, start in zip(starts, init, strict=True):
            v = self.values[start]
            self.env[tensor] = self.new(TensorType(v.shape, v.dtype), v.splits)
            carry_in.append(self.env[tensor])
        sliced = self._sliced(block)
        self.nodes(block)
        carry_out = [self.at_home(self.value_of(t)) for t in block.carry_out] if whole else []
        finals = [self._outer(v, None) for v in carry_in]
        pairs = [*block.stacked, *self._saves(block)]
        stacked = [self._stack(block, inner, outer) for inner, outer in pairs if self._here(inner, node)]
        if self._recomputes(block):
            stacks = [(c, self._outer(c, block)) for c in carry_in]
            self._carry_stacks[block.id] = [o for _, o in stacks]
            stacked += stacks
        summed = []
        for inner, outer in block.summed:
            if self._here(inner, node):
                value = self.value_of(inner)
                self.env[outer] = self._outer(value, None)
                summed.append((value, self.env[outer]))
        body, self.code = tuple(self.code), outer_code
        self.env.update(zip(node.outputs, finals, strict=False))
        carried = tuple(zip(init, carry_in, carry_out, finals, strict=True))
        self.emit(
            make_loop(
                origin,
                block.dim,
                block.reverse,
                index,
                carried,
                tuple(sliced),
                tuple(stacked),
                tuple(summed),
                body,
            )
        )

    def _here(self, tensor: int, scan: Node) -> bool:
        """Whether this lowering computes a body tensor (a loop's own carries belong to its scan)."""
        if self.keep is None:
            return True
        producer = self.graph.producer.get(tensor, scan)
        return producer.index in self.keep.nodes

    def nodes(self, block: Block) -> None:
        for node in block.nodes:
            wanted = self.keep is None or node.index in self.keep.nodes
            if wanted or (node.body is not None and self.keep and node.body.id in self.keep.blocks):
                self.node(node)

    def _sliced(self, block: Block) -> list[tuple[int, int]]:
        """Parts of stacked values; with recomputation, saved values are computed anew instead."""
        pairs = []
        saved = {o: i for i, o in block.forward.saved.items()} if block.forward else {}
        again: list[tuple[int, int]] = []
        for outer, inner in block.sliced:
            if outer in saved and block.forward and self._recomputes(block.forward):
                again.append((saved[outer], inner))
                continue
            if self.keep is not None and outer not in self.env and not self._used(block, inner):
                continue
            pairs.append(self._part(self.value_of(outer), inner))
        if again:
            pairs += self._recomputed(block, again)
        return pairs

    def _used(self, block: Block, tensor: int) -> bool:
        assert self.keep is not None
        return any(tensor in n.inputs for n in block.nodes if n.index in self.keep.nodes)

    def _part(self, outer: int, inner: int) -> tuple[int, int]:
        v = self.values[outer]
        self.env[inner] = self.new(TensorType(Shape(v.shape.dims[1:]), v.dtype), v.splits[1:], v.partial)
        return outer, self.env[inner]

    def _recomputed(self, block: Block, again: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Runs the needed part of the forward body inside the backward body."""
        forward = block.forward
        assert forward is not None
        pairs = []
        for stack, tensor in zip(self._carry_stacks[forward.id], forward.carry_in, strict=True):
            pairs.append(self._part(stack, tensor))
        for outer, inner in forward.sliced:
            pairs.append(self._part(self.value_of(outer), inner))
        assert block.index is not None and forward.index is not None
        self.env[forward.index] = self.env[block.index]
        needed = {tensor for tensor, _ in again}
        chosen: list[Node] = []
        for node in reversed(forward.nodes):
            if any(o in needed for o in node.outputs):
                chosen.append(node)
                needed.update(node.inputs)
        for node in reversed(chosen):
            self.node(replace(node, phase="recompute"))
        for tensor, inner in again:
            self.env[inner] = self.value_of(tensor)
        return pairs

    def _recomputes(self, block: Block) -> bool:
        return (
            block.dim is not None
            and block.dim.name in self.recompute
            and bool(block.saved)
            and not block.parent
        )

    def _saves(self, block: Block) -> list[tuple[int, int]]:
        return [] if self._recomputes(block) else list(block.saved.items())

    def _stack(self, block: Block, inner: int, outer: int) -> tuple[int, int]:
        value = self.value_of(inner)
        self.env[outer] = self._outer(value, block)
        return value, self.env[outer]

    def _outer(self, id: int, stack: Block | None) -> int:
        v = self.values[id]
        if stack is None:
            return self.new(TensorType(v.shape, v.dtype), v.splits, v.partial)
        assert stack.dim is not None
        return self.new(TensorType(Shape([stack.dim, *v.shape]), v.dtype), ((), *v.splits), v.partial)


def lower_base(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    results: Mapping[str, Tensor] | None = None,
    storage: Mapping[str, Splits] | None = None,
    recompute: Iterable[str] = (),
    keep: Keep | None = None,
) -> Program:
    """Lowers every node alone; see the module's text. LayoutError if the layout is not legal for the
    graph."""
    state = Lowering(graph, mesh, layout, storage, recompute, keep)
    state.nodes(graph.blocks[0])
    returned = {name: state.at_home(state.value_of(t.id)) for name, t in (results or {}).items()}
    return Program(
        mesh, layout, tuple(state.values), tuple(state.code), dict(state.stored), dict(state.feeds), returned
    )
