"""Base lowering of loops: bodies, and values that cross their border."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import (
    AllReduce,
    Carry,
    Crossing,
    Instr,
    Local,
    Origin,
    Result,
    Sliced,
    make_loop,
)
from mesh_tf_core.lower.placing import Placing
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.rematerialization import Rematerialization, rematerialization
from mesh_tf_core.lower.saving import Saving
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.stages import JoinedParts, StageNumbers, StagePart, StageStack, StageTerm
from mesh_tf_core.tracing.residuals import several
from mesh_tf_core.tracing.stage_layers import loop_name


class Loops(Saving):
    """Lowers the loops of one lowering.

    Args:
      low, recompute, node: as of `Saving`.
      nodes: lowers the nodes of a block.
    """

    def __init__(
        self, low: Placing, recompute: Policies, node: Callable[[Node], None], nodes: Callable[[Block], None]
    ) -> None:
        super().__init__(low, recompute, node)
        self.recompute = recompute
        self._nodes, self.before = nodes, list[dict[int, int]]()  # values in each part of a loop

    def loop(self, node: Node) -> None:
        block, origin, around = node.body, self.low.origin, (self.remat, self._kept)
        assert block is not None and block.dim is not None
        init: Sequence[int] = [self.low.to_natural(self.low.value_of(i)) for i in node.inputs]
        parts = self._alike(self.low.graph.blocks[block.id])
        if len(parts) < 2 and parts[0][1] == block.dim.size:
            self._loop(node, block, init, block.begin)
            return
        stacks, sums = ([o for _, o in pairs] for pairs in (block.stacked, block.summed))
        made: dict[int, list[tuple[int, int]]] = {o: [] for o in (*stacks, *sums)}
        for offset, size, how in parts:
            self.low.origin, self.remat, self._kept = origin, how, self._parts.setdefault(how, {})
            part = replace(block, dim=Dim(block.dim.name, size))
            init = self._loop(node, part, init, offset)
            for o, values in made.items():
                values.append((offset, self.low.env[o]))
            self.before.append(dict(self.low.env) if self.low.part.alone else {})
        self.remat, self._kept = around
        for o, values in made.items() if len(parts) > 1 else ():
            pieces, v = [value for _, value in sorted(values)], self.low.values[values[0][1]]
            op: Op = AddN() if o in sums else JoinedParts(block.dim.name)
            type = TensorType(v.shape if o in sums else v.shape.resized(block.dim), v.dtype)
            self.low.env[o] = self.low.new(type, v.splits, v.partial, o)
            self.low.emit(Local(tuple(pieces), (self.low.env[o],), origin, op))

    def _alike(self, block: Block) -> Sequence[tuple[int, int, Rematerialization]]:
        """A loop's iterations in parts that are recomputed alike: first element, number, and how. A second
        run is of those that have one."""
        name, size = loop_name(block.forward or block, self.low.graph), block.dim.size if block.dim else 0
        asked = {each for each in self.recompute if each.only and each.dim == name}
        if not asked or not self.remat.again(block.forward or block):
            return ((0, size, self.remat),)
        (count,), rest = (each.only for each in asked), self.recompute - asked
        again, once = (
            rematerialization(self.low.graph, each, self.low.part.unread)
            for each in (rest | {each.whole for each in asked}, rest)
        )
        parts = (0, count, again), (count, size - count, once)
        return parts[:1] if self.low.run else parts[::-1] if block.reverse else parts

    def _loop(
        self, node: Node, block: Block, init: Sequence[int], offset: int | None = None
    ) -> Sequence[int]:
        """Lowers a loop, or a part of it from `offset` on; its last state."""
        origin = self.low.origin
        assert block.dim is not None
        over, whole = self._over(block), self.low.graph.blocks[block.id]
        first = None if block.first is None else self.low.value_of(block.first)
        self._bring(block)
        with self.low.block() as code:
            with self.low.inside(over):
                index = self.low.new(self.low.graph.tensor(block.index).type, ())  # type: ignore[arg-type]
                self.low.env[block.index] = index  # type: ignore[index]
                carry_in = []
                for tensor, start in zip(block.carry_in, init, strict=True):
                    v = self.low.values[start]
                    self.low.env[tensor] = self.low.like(v, v.splits)
                    carry_in.append(self.low.env[tensor])
                sliced = self._sliced(block)
                runs = None if block.runs is None else self.low.value_of(block.runs)
                self._nodes(block)
                carry_out = [self.low.to_natural(self.low.value_of(t)) for t in block.carry_out]
            finals = [self._outer(v, None) for v in carry_in]
            sums, pairs = self._read_again(block.summed, block), self._read_again(block.stacked, block)
            stacked = [self._result(inner, outer, block) for inner, outer in pairs]
            stacked += self._saved(block, whole, node)
            summed = [self._result(inner, outer, None) for inner, outer in sums]
            behind = list[Instr]()
            if not over:
                summed, behind = self._stacked_after(summed, {*carry_out, *(r.inner for r in stacked)})
        body = tuple(code)
        if over:
            self._spread(block, over, origin, index, sliced, body, stacked, summed)
            for _, total in sums if self.low.layout.elsewhere else ():
                if total not in self.low.graph.gradient_of:  # which may lie as its variable's state
                    self.low.env[total] = self.low.to_natural(self.low.env[total])
            return ()
        self.low.env.update(zip(node.outputs, finals, strict=False))
        carried = tuple(Carry(*c) for c in zip(init, carry_in, carry_out, finals, strict=True))
        outer = (*(s.outer for s in sliced), *(r.outer for r in stacked))
        if all(self.low.values[i].shape.sizes[0] == block.dim.size for i in outer):
            first = None
        crossing = Crossing(carried, tuple(sliced), tuple(stacked), tuple(summed))
        own = origin, block.dim, block.reverse, index, crossing, body
        made = make_loop(*own, runs, block.branch, first, whole.runs is not None and runs is None)
        self.low.emit(replace(made, offset=offset))
        self.low.code.extend(behind)
        return finals

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

    def _stacked_after(
        self, summed: Sequence[Result], kept: Collection[int]
    ) -> tuple[list[Result], list[Instr]]:
        """The sums of a loop, and what follows on it: what stages stack in its iterations is added up by
        parts and stacked once, so that layers' gradients are added to parts of the sum (`Program.added`).

        Args:
          kept: what else the loop hands out.
        """
        low = self.low
        calls = (i for i in low.code if isinstance(i, Local) and isinstance(i.op, StageStack | JoinedParts))
        makers = {i.outputs[0]: i for i in calls}
        after, seen = list[Instr](), set[int]()

        def terms(term: int, total: int) -> Iterator[Result]:
            seen.add(term)
            if (maker := makers.get(term)) is None:
                yield Result(term, total)
                return
            values = (low.values[i] for i in maker.inputs)
            own = [Result(v.id, low.like(v, v.splits, v.partial)) for v in values]
            for each in own:
                yield from terms(*each)
            after.append(Local(tuple(t.outer for t in own), (total,), maker.origin, maker.op))

        found = [each for term, total in summed for each in terms(term, total)]
        read, code = {*kept, *(r.inner for r in found)}, list[Instr]()
        for instr in reversed(low.code):
            if seen.isdisjoint(instr.outputs) or not read.isdisjoint(instr.outputs):
                read.update(instr.inputs)
                code.append(instr)
        low.code[:] = code[::-1]
        return found, after

    def _sliced(self, block: Block) -> list[Sliced]:
        """Parts of stacked values; with recomputation, saved values are computed anew instead."""
        forward, around = block.forward, self.low.graph.blocks[block.parent or 0]
        then = {now: then for then, now in around.captured.items()}
        saved = {o: i for i, o in forward.saved.items()} if forward else {}
        pairs, again = list[Sliced](), dict[int, int]()
        for outer, inner in block.sliced:
            tensor = saved.get(then.get(outer, outer))
            if tensor is not None and forward and self.remat.again(forward):
                again[inner] = tensor
            elif tensor is None or not self.remat.unsaved(tensor):
                pairs.append(self._part(self.low.lying(outer), inner))
        if block.spread:
            pairs += self._masters(block)
        if forward:
            pairs += self._taken(block, forward)
        if forward and again:
            self._recompute(forward)
        for inner, tensor in again.items():
            if not self.remat.unsaved(tensor):
                self.low.env[inner] = self.low.value_of(tensor)
        return pairs

    def _masters(self, block: Block) -> list[Sliced]:
        """An iteration's parts of master copies, which the updates inside work on."""
        masters = self.low.masters
        found = [
            (inner, self._part(masters[outer], None)) for outer, inner in block.sliced if outer in masters
        ]
        masters.update((inner, part.inner) for inner, part in found)
        return [part for _, part in found]

    def _result(self, inner: int, outer: int, stack: Block | None) -> Result:
        """What a loop makes of a body's tensor: a stack along the block's dimension, or a sum."""
        value = self._scattered(self.low.value_of(inner), self.low.graph.gradient_of.get(outer))
        self.low.env[outer] = self._outer(value, stack, self.low.graph.tensor(outer).shape)
        return Result(value, self.low.env[outer])

    def _scattered(self, value: int, variable: str | None) -> int:
        """A layer's part of a gradient, as its variable's state is split (from storage stage 2 on)."""
        if variable is None:
            return value
        return self.low.reshard(value, self.low.oracle.row(GRADIENT, variable, BACKWARD))
