"""Base lowering of loops: bodies, and the values that cross their border, on the devices or their hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Block, Node, loop_name
from mesh_tf_core.ir.builder import ProgramBuilder
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import AllReduce, Carry, Instr, Local, Loop, Origin, Result, Sliced
from mesh_tf_core.ir.tensor import having
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.placement import check_counted
from mesh_tf_core.lower.placing import Placing
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT, SAVED, UPDATE
from mesh_tf_core.lower.subgraph import GraphPart, Twin
from mesh_tf_core.ops.basic import AddN
from mesh_tf_core.ops.stages import JoinedParts, PartsInPlace, StageNumbers, StagePart, StageStack, StageTerm
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.residuals import several


class Loops(Placing):
    """Lowers the loops, and blocks of nodes, of one lowering.

    Attributes:
      body: the block whose nodes are being lowered.
      before: values in each part of a loop.
    """

    def __init__(self, graph: Graph, oracle: Oracle, part: GraphPart) -> None:
        super().__init__(graph, oracle, part)
        self.body, self.before = part.root, list[dict[int, int]]()

    def node(self, node: Node) -> None:
        """Lowers a node."""
        raise NotImplementedError

    def scan(self, node: Node) -> None:
        block, origin = node.body, self.origin
        assert block is not None
        init: Sequence[int] = [self.to_natural(self.value_of(i)) for i in node.inputs]
        if not block.parts:
            self._loop(node, block, init)
            return
        stacks, sums = ([o for _, o in pairs] for pairs in (block.stacked, block.summed))
        made: dict[int, list[tuple[int, int]]] = {o: [] for o in (*stacks, *sums)}
        for part in block.parts:
            self.origin = origin
            init = self._loop(node, part, init)
            for o, values in made.items():
                values.append((part.begin or 0, self.env[o]))
            self.before.append(dict(self.env) if self.part.alone else {})
        for o, values in made.items() if len(block.parts) > 1 else ():
            pieces, v = [value for _, value in sorted(values)], self.values[values[0][1]]
            op: Op = AddN() if o in sums else JoinedParts(block.dim.name)
            if o in stacks and v.shape.sizes[0] == self.graph.tensor(o).shape.sizes[0]:
                op = PartsInPlace()
            type = TensorType(v.shape.resized(block.dim) if isinstance(op, JoinedParts) else v.shape, v.dtype)
            self.env[o] = self.new(type, v.splits, v.partial, o)
            self.emit(Local(tuple(pieces), (self.env[o],), origin, op))

    def _loop(self, node: Node, block: Block, init: Sequence[int]) -> Sequence[int]:
        """Lowers a loop, or a part of it; its last state."""
        origin = self.origin
        over, whole = self._over(block), self.graph.blocks[block.id]
        first = None if block.first is None else self.value_of(block.first)
        with self.block() as code:
            with self.inside(over):
                index = self.new(self.graph.tensor(block.index).type, ())  # type: ignore[arg-type]
                self.env[block.index] = index  # type: ignore[index]
                carry_in = []
                for tensor, start in zip(block.carry_in, init, strict=True):
                    v = self.values[start]
                    self.env[tensor] = self.like(v, v.splits)
                    carry_in.append(self.env[tensor])
                sliced = [self._part(self.lying(outer), inner) for outer, inner in block.sliced]
                sliced += self._masters(block) if block.spread else ()
                runs = None if block.runs is None else self.value_of(block.runs)
                self.nodes(block)
                carry_out = [self.to_natural(self.value_of(t)) for t in block.carry_out]
            finals = [self._outer(v, None) for v in carry_in]
            stacked = [self._result(inner, outer, block) for inner, outer in block.stacked]
            stacked += self._saved(block, node)
            summed = [self._result(inner, outer, None) for inner, outer in block.summed]
            behind = list[Instr]()
            if not over:
                summed, behind = self._stacked_after(summed, {*carry_out, *(r.inner for r in stacked)})
        body = tuple(code)
        if over:
            self._spread(block, over, origin, index, sliced, body, stacked, summed)
            for _, total in block.summed if self.layout.elsewhere else ():
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
        self.emit(made.remade(first=first, undecided=undecided, offset=block.begin))
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

    def _masters(self, block: Block) -> list[Sliced]:
        """An iteration's parts of master copies, which the updates inside work on."""
        masters = self.masters
        found = [(inner, self._part(masters[outer])) for outer, inner in block.sliced if outer in masters]
        masters.update((inner, part.inner) for inner, part in found)
        return [part for _, part in found]

    def _result(self, inner: int, outer: int, stack: Block | None) -> Result:
        """What a loop makes of a body's tensor: a stack along the block's dimension, or a sum."""
        value, variable = self.value_of(inner), self.graph.gradient_of.get(outer)
        if variable is not None:
            # A layer's part of a gradient is split as its variable's state (from storage stage 2 on).
            value = self.reshard(value, self.oracle.row(GRADIENT, variable, BACKWARD))
        self.env[outer] = self._outer(value, stack, self.graph.tensor(outer).shape)
        return Result(value, self.env[outer])

    def nodes(self, block: Block) -> None:
        beside = self.part.beside
        with having(self, body=block):
            for node in block.nodes:
                for each in beside.get(node.index, ()) if beside else ():
                    self._moved_beside(each)
                self.node(node)
        for want in self.part.wanted.get(block.id, ()):
            if not want.gradient_of:
                self.origin = replace(self.origin, node=want.reader, phase=want.phase)
                self.to_natural(self.value_of(want.tensor))
            elif want.tensor in self.env:
                # The update asks for it: a sum that only the update reads may travel with others.
                self.origin = Origin(self.origin.node, want.gradient_of, want.phase)
                self.reshard(self.env[want.tensor], self.oracle.row(GRADIENT, want.gradient_of, UPDATE))

    def _moved_beside(self, each: Twin) -> None:
        """Notes what backward moves of a tensor that a second run reads: its readers are lowered, and
        dropped."""
        value = self.lying(each.tensor)
        with ProgramBuilder.block(self) as code:  # what they make is no code of this part
            for node in each.readers:
                # A layout that it does not allow, its own lowering refuses.
                with having(self, env={**self.env, each.twin: value}), suppress(LayoutError):
                    self.node(node)
        self.beside += [instr for instr in code if not isinstance(instr, Local | Loop)]

    # -- stacks and their parts ------------------------------------------------------------------------------

    def _saved(self, block: Block, node: Node) -> list[Result]:
        """The stacks that a loop, or a part of it, saves for its backward."""
        whole, saved = self.graph.blocks[block.id], {i: self.lying(i) for i in block.saved}
        name = loop_name(whole, self.graph) if saved else None
        if name is not None and self.oracle.row(SAVED, name, BACKWARD).host:
            # What decides whether an iteration runs is read before it begins; stacks for second runs of loops
            # inside lie where those do.
            own = self.part.step.again(whole)
            names = (i for i, o in block.saved.items() if (own or o >= 0) and i != whole.runs)
            saved |= self._on_host({i: saved[i] for i in names if not self.values[saved[i]].host}, node)
        for inner, outer in block.saved.items():
            shape = self.graph.tensor(outer).shape if outer >= 0 else None
            self.env[outer] = self._outer(saved[inner], block, shape)
        return [Result(saved[inner], self.env[outer]) for inner, outer in block.saved.items()]

    def _on_host(self, found: Mapping[int, int], node: Node) -> dict[int, int]:
        """What a loop saves, brought to the host: its state as an iteration begins, the rest as it ends."""
        code, made = self.code, {o for instr in self.code for o in instr.outputs}
        self.origin, at = Origin(node.index, node.scope, node.phase), len(code)
        kept = {key: self.kept_on_host(value) for key, value in found.items()}
        stores = code[at:]
        code[at:] = [store for store in stores if store.inputs[0] in made]
        code[:0] = [store for store in stores if store.inputs[0] not in made]
        return kept

    def _over(self, block: Block) -> Axes:
        """The axes that the iterations of a loop are spread over: the stages of a pipeline."""
        layout, name, ways = self.layout, block.dim.name, self.oracle.ways
        axes, further = layout.axes(name), layout.further(name)
        check_counted(layout, name, further if block.spread or ways(axes) == 1 else (*axes, *further))
        if not block.spread:
            return ()
        if ways(axes) != block.dim.size:
            found = f"{'+'.join(axes)} has {ways(axes)}" if axes else "no rule splits it"
            raise LayoutError(
                f"layout {self.layout}: {block.dim.name!r} must be split over exactly {block.dim.size} "
                f"devices, but {found}"
            )
        return axes

    def _part(self, outer: int, inner: int = -1) -> Sliced:
        v = self.values[outer]
        shape, splits = _part_of(v.shape), v.splits[1:]
        size = several(self.graph.tensor(inner).shape, v.shape) if inner >= 0 else None
        if size is not None:
            shape, splits = _stack_of(size, shape), ((), *splits)
        part = self.new(TensorType(shape, v.dtype), splits, v.partial, host=v.host)
        if inner != -1:
            self.bind(inner, part)
        return Sliced(outer, part)

    def _outer(self, id: int, stack: Block | None, whole: Shape | None = None) -> int:
        """A new value for what a loop makes of a body's; `whole`: of a stack of which an iteration gives
        several elements, or that is longer than the loop."""
        v = self.values[id]
        if stack is None:
            return self.like(v, v.splits, v.partial)
        over = self._over(stack)
        every = self.graph.blocks[stack.id].dim
        if whole is not None and stack.dim != every == whole.dims[0]:
            whole = None  # of a part of the loop
        dim, shape, splits = stack.dim if whole is None else whole.dims[0], v.shape, v.splits
        if whole is not None and several(shape, whole) is not None:
            shape, splits = _part_of(shape), splits[1:]
        return self.new(TensorType(_stack_of(dim, shape), v.dtype), (over, *splits), v.partial, host=v.host)


@lru_cache(maxsize=1 << 14)
def _stack_of(dim: Dim, shape: Shape) -> Shape:
    return Shape((dim, *shape))


@lru_cache(maxsize=1 << 14)
def _part_of(stack: Shape) -> Shape:
    return Shape(stack.dims[1:])
