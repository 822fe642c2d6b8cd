"""Base lowering of loops: bodies, what crosses their border, forward bodies that run again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import AllReduce, Carry, Instr, Local, Origin, Result, Sliced, make_loop
from mesh_tf_core.lower.nodes import renamed_saves
from mesh_tf_core.lower.placing import Placing
from mesh_tf_core.lower.rematerialization import (
    NOTHING,
    leading_to,
    rematerialization,
    stands_beside_backward,
)
from mesh_tf_core.lower.subgraph import Pairs
from mesh_tf_core.ops.stages import StageNumbers, StagePart, StageStack, StageTerm
from mesh_tf_core.tracing.residuals import several

Key = int | tuple[int, "Key"]
"""What a loop keeps for second runs: a tensor of its body, or what a loop inside (its id) keeps."""


class Loops:
    """Lowers the loops of one lowering.

    Args:
      low: its state.
      recompute: the loops that run again in backward, and what they keep (`kept.Recomputed`).
      node, nodes: lower a node (a second time, or not), and those of a block.
    """

    def __init__(
        self,
        low: Placing,
        recompute: frozenset[str],
        node: Callable[[Node, bool], None],
        nodes: Callable[[Block], None],
    ) -> None:
        self.low, self._node, self._nodes = low, node, nodes
        self.remat = rematerialization(low.graph, recompute)
        self._kept: dict[int, dict[Key, int]] = {}

    def loop(self, node: Node) -> None:
        block, origin = node.body, self.low.origin
        assert block is not None and block.dim is not None
        if axes := dict(self.low.layout.elsewhere).get(block.dim.name):
            raise LayoutError(
                f"layout {self.low.layout}: {block.dim.name!r} counts the iterations of a loop and cannot "
                f"be split further over {'+'.join(axes)}; drop this rule"
            )
        over = self._over(block)
        whole = self.low.subgraph is None or node.index in self.low.subgraph.nodes
        decides = block.runs if whole else None
        inputs, starts = (node.inputs, block.carry_in) if whole else ((), ())
        init = [self.low.to_natural(self.low.value_of(i)) for i in inputs]
        if self.low.subgraph is None:
            self._bring(block)
        outer_code, self.low.code = self.low.code, []
        outer_memory = self.low.moved, self.low.converted
        self.low.moved, self.low.converted = {}, {}
        outer_within, self.low.within = self.low.within, (*self.low.within, *over)
        index = self.low.new(self.low.graph.tensor(block.index).type, ())  # type: ignore[arg-type]
        self.low.env[block.index] = index  # type: ignore[index]
        carry_in = []
        for tensor, start in zip(starts, init, strict=True):
            v = self.low.values[start]
            self.low.env[tensor] = self.low.like(v, v.splits)
            carry_in.append(self.low.env[tensor])
        sliced = self._sliced(block)
        runs = None if decides is None else self.low.value_of(decides)
        self._nodes(block)
        carry_out = [self.low.to_natural(self.low.value_of(t)) for t in block.carry_out] if whole else []
        self.low.within = outer_within
        finals = [self._outer(v, None) for v in carry_in]
        stacks, sums, saves = self._made(node, block)
        pairs = self._read_again([*stacks, *self._saves(block, saves)], block)
        stacked = [self._result(inner, outer, block) for inner, outer in pairs]
        stacked += self._keeps(block, node, starts)
        summed = [self._result(inner, outer, None) for inner, outer in sums]
        body, self.low.code = tuple(self.low.code), outer_code
        self.low.moved, self.low.converted = outer_memory
        if over:
            self._spread(block, over, origin, index, sliced, body, stacked, summed)
            return
        self.low.env.update(zip(node.outputs, finals, strict=False))
        carried = tuple(Carry(*c) for c in zip(init, carry_in, carry_out, finals, strict=True))
        self.low.emit(
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
                runs,
                block.branch,
            )
        )

    def _over(self, block: Block) -> Axes:
        """The axes that the iterations of a loop are spread over: the stages of a pipeline."""
        assert block.dim is not None
        axes = self.low.layout.axes(block.dim.name)
        if axes and not block.spread:
            if self.low.oracle.ways(axes) == 1:
                return ()
            raise LayoutError(
                f"layout {self.low.layout}: {block.dim.name!r} counts the iterations of a loop and cannot "
                f"be split over {'+'.join(axes)}; drop this rule"
            )
        if block.spread and self.low.oracle.ways(axes) != block.dim.size:
            raise LayoutError(
                f"layout {self.low.layout}: {block.dim.name!r} has {block.dim.size} stages or replicas, each "
                f"on devices of its own, and is split over {'+'.join(axes) or 'no axis'}"
            )
        return axes

    def _spread(
        self,
        block: Block,
        over: Axes,
        origin: Origin,
        index: int,
        sliced: Sequence[Sliced],
        body: Sequence[Instr],
        stacked: Sequence[Result],
        summed: Sequence[Result],
    ) -> None:
        """A loop of which every device runs its own iteration: the body itself, on the parts that it has."""
        low, dim = self.low, block.dim
        assert dim is not None

        def local(op: Op, inputs: tuple[int, ...], output: int) -> None:
            low.emit(Local(inputs, (output,), origin, op))

        numbers = low.new(TensorType(Shape([dim]), "int32"), (over,))
        local(StageNumbers(dim, "int32"), (), numbers)
        local(StagePart(dim.name, None), (numbers,), index)
        for outer, inner in sliced:
            size = several(low.values[inner].shape, low.values[outer].shape)
            local(StagePart(dim.name, size), (outer,), inner)
        low.code.extend(body)
        for inner, outer in stacked:
            shape = low.values[outer].shape
            several_of = several(low.values[inner].shape, shape) is not None
            local(StageStack(shape.dims[0], several_of), (inner,), outer)
        axes = low.oracle.ordered(over)
        for inner, outer in summed:
            term = low.like(low.values[inner], low.values[inner].splits, axes)
            local(StageTerm(), (inner,), term)
            low.emit(AllReduce((term,), (outer,), origin, axes))

    def _made(self, scan: Node, block: Block) -> tuple[Pairs, Pairs, Pairs]:
        """What this lowering computes of what a loop stacks, sums and saves (a loop's own carries belong to
        its scan)."""
        subgraph = self.low.subgraph
        if subgraph is not None:
            return subgraph.made(scan, self.low.graph)
        return tuple(block.stacked), tuple(block.summed), tuple(block.saved.items())

    def _here(self, tensor: int, scan: Node) -> bool:
        """Whether this lowering computes a body tensor."""
        subgraph = self.low.subgraph
        return subgraph is None or subgraph.computes(tensor, scan, self.low.graph)

    def _sliced(self, block: Block) -> list[Sliced]:
        """Parts of stacked values; with recomputation, saved values are computed anew instead."""
        self._rename_again(block)
        given = [(outer, inner) for outer, inner in block.sliced if inner not in self.low.renamed]
        if self.low.subgraph is not None:
            env, reads = self.low.env, self.low.subgraph.reads(block)
            return [
                self._part(self.low.value_of(outer), inner)
                for outer, inner in given
                if outer in env or inner in reads
            ]
        forward = block.forward
        saved = {o: i for i, o in forward.saved.items()} if forward else {}
        then = self._stands_for(block)
        pairs = []
        again: list[tuple[int, int]] = []
        for outer, inner in given:
            tensor = saved.get(then.get(outer, outer))
            if tensor is not None and forward and self.remat.again(forward):
                again.append((tensor, inner))
                continue
            if tensor is not None and self.remat.unsaved(tensor):
                continue
            pairs.append(self._part(self.low.value_of(outer), inner))
        if block.spread:
            pairs += self._masters(block)
        if again:
            pairs += self._recomputed(block, again)
        elif forward and not self.remat.again(forward):
            pairs += self._unpacked(block, forward)
        return pairs

    def _masters(self, block: Block) -> list[Sliced]:
        """An iteration's parts of master copies, which the updates inside work on."""
        masters = self.low.masters
        found = [
            (inner, self._part(masters[outer], (inner, inner)))
            for outer, inner in block.sliced
            if outer in masters
        ]
        masters.update((inner, part.inner) for inner, part in found)
        return [part for _, part in found]

    def _part(self, outer: int, inner: Key) -> Sliced:
        v = self.low.values[outer]
        shape, splits = _part_of(v.shape), v.splits[1:]
        size = several(self.low.graph.tensor(inner).shape, v.shape) if isinstance(inner, int) else None
        if size is not None:
            shape, splits = _stack_of(size, shape), ((), *splits)
        part = self.low.new(TensorType(shape, v.dtype), splits, v.partial, host=v.host)
        if isinstance(inner, int):
            self.low.bind(inner, part)
        return Sliced(outer, part)

    def _recomputed(self, block: Block, again: Sequence[tuple[int, int]]) -> list[Sliced]:
        """Runs the needed part of the forward body inside the backward body."""
        forward = block.forward
        assert forward is not None
        pairs = [self._part(stack, key) for key, stack in self._kept[forward.id].items()]
        for key, part in zip(self._kept[forward.id], pairs, strict=True):
            if self.low.values[part.inner].host and isinstance(key, int):
                self.low.bind(key, self.low.loaded(part.inner))
        then, needed = self._stands_for(block), self.remat.needs(forward)
        known = {then.get(outer, outer): inner for outer, inner in block.sliced}
        for outer, inner in forward.sliced:
            if known.get(outer) in self.low.env:
                self.low.env[inner] = self.low.env[known[outer]]
            elif inner in needed:
                pairs.append(self._part(self.low.value_of(outer), inner))
        assert block.index is not None and forward.index is not None
        self.low.env[forward.index] = self.low.env[block.index]
        for node in leading_to([tensor for tensor, _ in again], forward, self.remat.kept(forward)):
            self._node(node, True)
        for tensor, inner in again:
            if not self.remat.unsaved(tensor):
                self.low.env[inner] = self.low.value_of(tensor)
        return pairs

    def _stands_for(self, block: Block) -> dict[int, int]:
        """For the body around a backward loop: its tensors -> the forward's that they stand for."""
        around = self.low.graph.blocks[block.parent] if block.parent else None
        return {now: then for then, now in around.captured.items()} if around else {}

    def _bring(self, block: Block) -> None:
        """Before a backward loop: what second runs inside need without work from the body around."""
        forward, graph = block.forward, self.low.graph
        if forward is None or forward.parent == block.parent or not self.remat.names:
            return
        assert forward.parent is not None and block.parent is not None
        then, now = graph.blocks[forward.parent], graph.blocks[block.parent]
        if self.remat.again(then):
            return
        wanted = {t for t in self.remat.needs(forward) if graph.tensor(t).block == then.id}
        for node in then.nodes:
            missing = False
            for t in wanted.intersection(node.outputs):
                if now.captured.get(t) in self.low.env:
                    self.low.env[t] = self.low.env[now.captured[t]]
                else:
                    missing = missing or graph.is_free(graph.tensor(t), then)
            if missing:
                self._node(node, True)

    def _unpacked(self, block: Block, forward: Block) -> list[Sliced]:
        """One iteration's part of what the forward loop keeps for loops inside that run again."""
        pairs: list[Sliced] = []
        for key, stack in self._kept.get(forward.id, {}).items():
            pairs.append(self._part(stack, key))
            if not isinstance(key, int):
                self._kept.setdefault(key[0], {})[key[1]] = pairs[-1].inner
        stacks = {inner: outer for outer, inner in forward.sliced}
        stacks.update((i, o) for i, o in forward.saved.items() if not self.remat.unsaved(i))
        for t in self.remat.of_body(forward):
            if t == forward.index:
                self.low.env[t] = self.low.env[block.index]  # type: ignore[index]
            elif block.captured.get(t) in self.low.env:
                self.low.env[t] = self.low.env[block.captured[t]]
            elif t in stacks:
                pairs.append(self._part(self.low.value_of(stacks[t]), t))
        return pairs

    def _keeps(self, block: Block, node: Node, starts: Sequence[int]) -> list[Result]:
        """What recomputation saves instead: the state at the beginning of every iteration, as far as it is
        read again, and what it is to keep; for loops inside that run again, what they keep and read."""
        if not self.remat.names or self._saves_later(block):
            return []
        found: dict[Key, int] = {}
        if self.remat.again(block):
            subgraph = self.low.subgraph
            unread = NOTHING if subgraph is None else subgraph.unread
            alone = subgraph is not None  # the whole program drops what is dead
            read = self.remat.read_again(block, live=alone)
            found.update((t, self.low.env[t]) for t in starts if t in read)
            second = subgraph is not None and subgraph.again
            stays = NOTHING if second else self.remat.kept(block, unread, alone)
            found.update((t, self.low.value_of(t)) for t in sorted(stays) if self._here(t, node))
            if block.dim is not None and self.low.oracle.keeps_on_host(block.dim.name):
                found = self._on_host(found, node)
        else:
            for inner in self.remat.inner(block):
                kept = self._kept.get(inner.id, {})
                found.update(((inner.id, key), value) for key, value in kept.items())
            for t in self.remat.of_body(block):
                if self.remat.stacked(t, block) and self._here(t, node):
                    found[t] = self.low.value_of(t)
        self._kept[block.id] = {key: self._outer(value, block) for key, value in found.items()}
        return [Result(value, self._kept[block.id][key]) for key, value in found.items()]

    def _on_host(self, found: dict[Key, int], node: Node) -> dict[Key, int]:
        """What a loop keeps, brought to the host: its state as an iteration begins, the rest as it ends."""
        code, made = self.low.code, {o for instr in self.low.code for o in instr.outputs}
        self.low.origin, at = Origin(node.index, node.scope, node.phase), len(code)
        kept = {key: self.low.kept_on_host(value) for key, value in found.items()}
        stores = code[at:]
        code[at:] = [store for store in stores if store.inputs[0] in made]
        code[:0] = [store for store in stores if store.inputs[0] not in made]
        return kept

    def _saves(self, block: Block, saved: Pairs) -> list[tuple[int, int]]:
        if not saved or self.remat.again(block) or self._saves_later(block):
            return []
        renamed = self._renamed(block)
        return [(i, o) for i, o in saved if not self.remat.unsaved(i) and i not in renamed]

    def _renamed(self, block: Block) -> dict[int, Node]:
        """What a loop does not save for a rule for elsewhere (`renamed_saves`): nothing, where the one around
        it saves it once more."""
        layout = self.low.oracle.layout
        further = {name for name, _ in layout.elsewhere}
        if not further or self.remat.again(block) or self.remat.of_body(block):
            return {}
        if not stands_beside_backward(block, self.low.graph):
            return {}
        return {
            tensor: node
            for tensor, node in renamed_saves(block, further).items()
            if self._splits_further(self.low.graph.tensor(node.inputs[0]).shape, further)
        }

    def _splits_further(self, shape: Shape, names: set[str]) -> bool:
        """Whether rules for elsewhere split a value of this shape."""
        layout, ordered = self.low.oracle.layout, sorted(names)
        return layout.around(shape.names).axes_of(ordered) != layout.axes_of(ordered)

    def _rename_again(self, block: Block) -> None:
        """Notes what a backward body makes anew of what is saved."""
        forward = block.forward
        renamed = self._renamed(forward) if forward else {}
        if not renamed or forward is None:
            return
        saved, then = {o: i for i, o in forward.saved.items()}, self._stands_for(block)
        parts = {saved.get(then.get(outer, outer)): inner for outer, inner in block.sliced}
        for tensor, node in renamed.items():
            if tensor in parts and node.inputs[0] in parts:
                self.low.renamed[parts[tensor]] = parts[node.inputs[0]], node

    def _saves_later(self, block: Block) -> bool:
        """Whether a loop is inside of one that is recomputed: what it saves the first time nobody reads. (The
        whole program drops that as dead.)"""
        return self.low.subgraph is not None and not self.low.subgraph.again and self.remat.around(block)

    def _read_again(self, pairs: list[tuple[int, int]], block: Block) -> list[tuple[int, int]]:
        """What a loop stacks when one around it is recomputed: only what backward reads. (The whole program
        drops the rest as dead.)"""
        subgraph = self.low.subgraph
        if subgraph is None or not subgraph.again:
            return pairs
        around = block
        while around.parent is not None:
            around = self.low.graph.blocks[around.parent]
            if self.remat.again(around):
                needed = self.remat.read_again(around, live=True)
                return [(i, outer) for i, outer in pairs if outer in needed]
        return pairs

    def _result(self, inner: int, outer: int, stack: Block | None) -> Result:
        """What a loop makes of a body's tensor: a stack along the block's dimension, or a sum."""
        value = self._scattered(self.low.value_of(inner), self.low.graph.gradient_of.get(outer))
        whole = self.low.graph.tensor(outer).shape
        size = several(whole, self.low.values[value].shape) if stack is not None else None
        self.low.env[outer] = self._outer(value, stack, size)
        return Result(value, self.low.env[outer])

    def _scattered(self, value: int, variable: str | None) -> int:
        """A layer's part of a gradient, as its variable's state is split (from storage stage 2 on)."""
        if variable is None or not self.low.oracle.stage(variable, 2):
            return value
        view = self.low.oracle.view(variable)
        return self.low.placed(value, self.low.natural(self.low.values[value].shape, layout=view))

    def _outer(self, id: int, stack: Block | None, whole: Dim | None = None) -> int:
        """A new value for what a loop makes of a body's; `whole`: the first dimension of a stack of which an
        iteration gives several elements."""
        v = self.low.values[id]
        if stack is None:
            return self.low.like(v, v.splits, v.partial)
        assert stack.dim is not None
        over = self._over(stack)
        shape, splits = v.shape, v.splits
        if whole is not None:
            shape, splits = _part_of(shape), splits[1:]
        return self.low.new(
            TensorType(_stack_of(whole or stack.dim, shape), v.dtype), (over, *splits), v.partial, host=v.host
        )


@lru_cache(maxsize=1 << 14)
def _stack_of(dim: Dim, shape: Shape) -> Shape:
    return Shape((dim, *shape))


@lru_cache(maxsize=1 << 14)
def _part_of(stack: Shape) -> Shape:
    return Shape(stack.dims[1:])
