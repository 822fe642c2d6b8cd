"""Base lowering of loops: bodies, and values that cross their border."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.builder import ProgramBuilder
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import AllReduce, Carry, Instr, Local, Loop, Origin, Result, Sliced
from mesh_tf_core.ir.scopes import having
from mesh_tf_core.lower.rematerialization import Rematerialization, rematerialization
from mesh_tf_core.lower.saving import Saving
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT, UPDATE
from mesh_tf_core.lower.subgraph import Twin
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.stages import JoinedParts, PartsInPlace, StageNumbers, StagePart, StageStack, StageTerm
from mesh_tf_core.tracing.residuals import several
from mesh_tf_core.tracing.stage_layers import loop_name


class Loops(Saving):
    """Lowers the loops, and blocks of nodes, of one lowering."""

    def scan(self, node: Node) -> None:
        block, origin, around = node.body, self.origin, (self.remat, self._kept)
        assert block is not None and block.dim is not None
        init: Sequence[int] = [self.to_natural(self.value_of(i)) for i in node.inputs]
        parts = self._alike(self.graph.blocks[block.id])
        if len(parts) < 2 and parts[0][1] == block.dim.size:
            self._loop(node, block, init, block.begin)
            return
        stacks, sums = ([o for _, o in pairs] for pairs in (block.stacked, block.summed))
        made: dict[int, list[tuple[int, int]]] = {o: [] for o in (*stacks, *sums)}
        for offset, size, how in parts:
            self.origin, self.remat, self._kept = origin, how, self._parts.setdefault(how, {})
            part = replace(block, dim=Dim(block.dim.name, size))
            init = self._loop(node, part, init, offset)
            for o, values in made.items():
                values.append((offset, self.env[o]))
            self.before.append(dict(self.env) if self.part.alone else {})
        self.remat, self._kept = around
        for o, values in made.items() if len(parts) > 1 else ():
            pieces, v = [value for _, value in sorted(values)], self.values[values[0][1]]
            op: Op = AddN() if o in sums else JoinedParts(block.dim.name)
            if o in stacks and v.shape.sizes[0] == self.graph.tensor(o).shape.sizes[0]:
                op = PartsInPlace()
            type = TensorType(v.shape.resized(block.dim) if isinstance(op, JoinedParts) else v.shape, v.dtype)
            self.env[o] = self.new(type, v.splits, v.partial, o)
            self.emit(Local(tuple(pieces), (self.env[o],), origin, op))

    def _alike(self, block: Block) -> Sequence[tuple[int, int, Rematerialization]]:
        """A loop's iterations in parts that are recomputed alike: first element, number, and how. A second
        run is of those that have one."""
        name, size = loop_name(block.forward or block, self.graph), block.dim.size if block.dim else 0
        asked = {each for each in self.recompute if each.only and each.dim == name}
        if not asked or not self.remat.again(block.forward or block):
            return ((0, size, self.remat),)
        (count,), rest = (each.only for each in asked), self.recompute - asked
        again, once = (
            rematerialization(self.graph, each, self.part.unread)
            for each in (rest | {each.whole for each in asked}, rest)
        )
        parts = (0, count, again), (count, size - count, once)
        return parts[:1] if self.run else parts[::-1] if block.reverse else parts

    def _loop(
        self, node: Node, block: Block, init: Sequence[int], offset: int | None = None
    ) -> Sequence[int]:
        """Lowers a loop, or a part of it from `offset` on; its last state."""
        origin = self.origin
        assert block.dim is not None
        over, whole = self._over(block), self.graph.blocks[block.id]
        first = None if block.first is None else self.value_of(block.first)
        self._bring(block)
        with self.block() as code:
            with self.inside(over):
                index = self.new(self.graph.tensor(block.index).type, ())  # type: ignore[arg-type]
                self.env[block.index] = index  # type: ignore[index]
                carry_in = []
                for tensor, start in zip(block.carry_in, init, strict=True):
                    v = self.values[start]
                    self.env[tensor] = self.like(v, v.splits)
                    carry_in.append(self.env[tensor])
                sliced = self._sliced(block)
                runs = None if block.runs is None else self.value_of(block.runs)
                self.nodes(block)
                carry_out = [self.to_natural(self.value_of(t)) for t in block.carry_out]
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
            for _, total in sums if self.layout.elsewhere else ():
                if total not in self.graph.gradient_of:  # which may lie as its variable's state
                    self.env[total] = self.to_natural(self.env[total])
            return ()
        self.env.update(zip(node.outputs, finals, strict=False))
        carried = tuple(Carry(*c) for c in zip(init, carry_in, carry_out, finals, strict=True))
        outer = (*(s.outer for s in sliced), *(r.outer for r in stacked))
        if all(self.values[i].shape.sizes[0] == block.dim.size for i in outer):
            first = None
        crossing = carried, tuple(sliced), tuple(stacked), tuple(summed)
        undecided = whole.runs is not None and runs is None
        made = Loop((), (), origin, block.dim, block.reverse, index, *crossing, body, runs, block.branch)
        self.emit(made.remade(first=first, undecided=undecided, offset=offset))
        self.code.extend(behind)
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
        dim = block.dim
        assert dim is not None

        def local(op: Op, inputs: tuple[int, ...], output: int) -> None:
            self.emit(Local(inputs, (output,), origin, op))

        numbers = self.new(TensorType(Shape([dim]), "int32"), (over,))
        local(StageNumbers(dim, "int32"), (), numbers)
        local(StagePart(dim.name, None), (numbers,), index)
        for outer, inner in sliced:
            size = several(self.values[inner].shape, self.values[outer].shape)
            local(StagePart(dim.name, size), (outer,), inner)
        self.code.extend(body)
        for inner, outer in stacked:
            shape = self.values[outer].shape
            several_of = several(self.values[inner].shape, shape) is not None
            local(StageStack(shape.dims[0], several_of), (inner,), outer)
        axes = self.oracle.ordered(over)
        for inner, outer in summed:
            term = self.like(self.values[inner], self.values[inner].splits, axes)
            local(StageTerm(), (inner,), term)
            self.emit(AllReduce((term,), (outer,), origin, axes))

    def _stacked_after(
        self, summed: Sequence[Result], kept: Collection[int]
    ) -> tuple[list[Result], list[Instr]]:
        """The sums of a loop, and what follows on it: what stages stack in its iterations is added up by
        parts and stacked once, so that layers' gradients are added to parts of the sum (`Program.added`).

        Args:
          kept: what else the loop hands out.
        """
        calls = (
            i
            for i in self.code
            if isinstance(i, Local) and isinstance(i.op, StageStack | JoinedParts | PartsInPlace)
        )
        makers = {i.outputs[0]: i for i in calls}
        after, seen = list[Instr](), set[int]()

        def terms(term: int, total: int) -> Iterator[Result]:
            seen.add(term)
            if (maker := makers.get(term)) is None:
                yield Result(term, total)
                return
            values = (self.values[i] for i in maker.inputs)
            own = [Result(v.id, self.like(v, v.splits, v.partial)) for v in values]
            for each in own:
                yield from terms(*each)
            after.append(Local(tuple(t.outer for t in own), (total,), maker.origin, maker.op))

        found = [each for term, total in summed for each in terms(term, total)]
        read, code = {*kept, *(r.inner for r in found)}, list[Instr]()
        for instr in reversed(self.code):
            if seen.isdisjoint(instr.outputs) or not read.isdisjoint(instr.outputs):
                read.update(instr.inputs)
                code.append(instr)
        self.code[:] = code[::-1]
        return found, after

    def _sliced(self, block: Block) -> list[Sliced]:
        """Parts of stacked values; with recomputation, saved values are computed anew instead."""
        forward, around = block.forward, self.graph.blocks[block.parent or 0]
        then = {now: then for then, now in around.captured.items()}
        saved = {o: i for i, o in forward.saved.items()} if forward else {}
        pairs, again = list[Sliced](), dict[int, int]()
        for outer, inner in block.sliced:
            tensor = saved.get(then.get(outer, outer))
            if tensor is not None and forward and self.remat.again(forward):
                again[inner] = tensor
            elif tensor is None or not self.remat.unsaved(tensor):
                pairs.append(self._part(self.lying(outer), inner))
        if block.spread:
            pairs += self._masters(block)
        if forward:
            pairs += self._taken(block, forward)
        if forward and again:
            self._recompute(forward)
        for inner, tensor in again.items():
            if not self.remat.unsaved(tensor):
                self.env[inner] = self.value_of(tensor)
        return pairs

    def _masters(self, block: Block) -> list[Sliced]:
        """An iteration's parts of master copies, which the updates inside work on."""
        masters = self.masters
        found = [
            (inner, self._part(masters[outer], None)) for outer, inner in block.sliced if outer in masters
        ]
        masters.update((inner, part.inner) for inner, part in found)
        return [part for _, part in found]

    def _result(self, inner: int, outer: int, stack: Block | None) -> Result:
        """What a loop makes of a body's tensor: a stack along the block's dimension, or a sum."""
        value = self._scattered(self.value_of(inner), self.graph.gradient_of.get(outer))
        self.env[outer] = self._outer(value, stack, self.graph.tensor(outer).shape)
        return Result(value, self.env[outer])

    def _scattered(self, value: int, variable: str | None) -> int:
        """A layer's part of a gradient, as its variable's state is split (from storage stage 2 on)."""
        if variable is None:
            return value
        return self.reshard(value, self.oracle.row(GRADIENT, variable, BACKWARD))

    def nodes(self, block: Block) -> None:
        beside = self.part.beside
        for node in block.nodes:
            for each in beside.get(node.index, ()) if beside else ():
                self._moved_beside(each)
            self.node(node)
        for want in self.part.wanted.get(block.id, ()):
            if not want.gradient_of:
                self.origin = replace(self.origin, phase=want.phase)
                self.to_natural(self.value_of(want.tensor))
            elif want.tensor in self.env:
                # The update asks for it: a sum that only the update reads may travel with others.
                self.origin = Origin(self.origin.node, want.gradient_of, want.phase)
                self.reshard(self.env[want.tensor], self.oracle.row(GRADIENT, want.gradient_of, UPDATE))

    def _moved_beside(self, each: Twin) -> None:
        """Notes what backward moves of a tensor that a second run reads: its readers are lowered, and
        dropped."""
        value = self.lying(each.tensor)
        with ProgramBuilder.block(self):  # what they make is no code of this part
            for node in each.readers:
                # A layout that it does not allow, its own lowering refuses.
                with having(self, env={**self.env, each.twin: value}, run=""), suppress(LayoutError):
                    self.node(node)
