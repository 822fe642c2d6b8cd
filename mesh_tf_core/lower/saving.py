"""The values that loops save for backward, and how backward gets them again: stacks of saved values, and
values kept for second runs, on the devices or on their hosts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import lru_cache
from typing import TypeVar

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Block, Node, reads
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Origin, Result, Sliced
from mesh_tf_core.ir.scopes import having
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.placement import check_counted
from mesh_tf_core.lower.placing import Placing
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.rematerialization import KeptTensor, Rematerialization, beside, rematerialization
from mesh_tf_core.lower.storage import BACKWARD, SAVED
from mesh_tf_core.lower.subgraph import GraphPart
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.residuals import several
from mesh_tf_core.tracing.stage_layers import loop_name

K = TypeVar("K")


class Saving(Placing):
    """The stacks of one lowering's loops.

    Attributes:
      recompute: the loops that backward recomputes, and the values that they keep
        (`remat_policy.Recomputed`); `remat`: the same, of the iterations that are being lowered.
      before: values in each part of a loop.
    """

    def __init__(
        self, graph: Graph, oracle: Oracle, recompute: Policies, part: GraphPart | None = None
    ) -> None:
        super().__init__(graph, oracle, part)
        self.recompute, self.remat = recompute, rematerialization(graph, recompute, self.part.unread)
        self._kept: dict[KeptTensor, int] = {}
        self._parts: dict[Rematerialization, dict[KeptTensor, int]] = {}
        self.before: list[dict[int, int]] = []

    def node(self, node: Node) -> None:
        """Lowers a node."""
        raise NotImplementedError

    # -- in forward ------------------------------------------------------------------------------------------

    def _saved(self, block: Block, whole: Block, node: Node) -> list[Result]:
        """The stacks that a loop, or a part of the `whole` of it, saves for its backward: what that reads. Or
        for second runs: the state at the beginning of every iteration, as far as it is read again, and what
        is kept; for loops inside that run again, what they keep and read."""
        remat, env = self.remat, self.env
        if remat.run_of(whole) != self.run:
            return []
        again = remat.again(whole)
        own = [(i, o) for i, o in block.saved.items() if not again and not remat.unsaved(i)]
        pairs = self._read_again(own, block)
        saved = {i: self.lying(i) for i, _ in pairs}
        if saved and self._lies_on_host(whole):
            saved |= self._on_host({i: x for i, x in saved.items() if not self.values[x].host}, node)
        for inner, outer in pairs:
            env[outer] = self._outer(saved[inner], block, self.graph.tensor(outer).shape)
        results = [Result(saved[inner], env[outer]) for inner, outer in pairs]
        kept: dict[KeptTensor, int] = {}
        for key in remat.passed(whole):
            if key.loop != whole.id:
                kept.update({key: self._kept[key]} if key in self._kept else {})
            elif key.tensor in env and key.tensor not in self.given:  # a part's own nodes made it
                kept[key] = self.value_of(key.tensor)
        if again and self._lies_on_host(whole):
            # What decides whether an iteration runs is read before it begins.
            kept |= self._on_host({key: x for key, x in kept.items() if key.tensor != whole.runs}, node)
        for key, value in kept.items():
            self._kept[key] = self._outer(value, block)
            results.append(Result(value, self._kept[key]))
        return results

    def _lies_on_host(self, block: Block) -> bool:
        name = loop_name(block, self.graph)
        return name is not None and self.oracle.row(SAVED, name, BACKWARD).host

    def _on_host(self, found: Mapping[K, int], node: Node) -> dict[K, int]:
        """What a loop saves, brought to the host: its state as an iteration begins, the rest as it ends."""
        code, made = self.code, {o for instr in self.code for o in instr.outputs}
        self.origin, at = Origin(node.index, node.scope, node.phase), len(code)
        kept = {key: self.kept_on_host(value) for key, value in found.items()}
        stores = code[at:]
        code[at:] = [store for store in stores if store.inputs[0] in made]
        code[:0] = [store for store in stores if store.inputs[0] not in made]
        return kept

    def _read_again(self, pairs: list[tuple[int, int]], block: Block) -> list[tuple[int, int]]:
        """What a loop stacks in a second run: only what that reads, or backward."""
        if not self.run:
            return pairs
        around = block
        while loop_name(around, self.graph) != self.run:
            if around.parent is None:
                return []
            around = self.graph.blocks[around.parent]
        needed = self.remat.second(around).read
        return [(i, outer) for i, outer in pairs if outer in needed]

    # -- in backward -----------------------------------------------------------------------------------------

    def _taken(self, block: Block, forward: Block) -> list[Sliced]:
        """The parts of what a forward loop keeps, and reads by parts, for its second run or those inside."""
        env, pairs, remat = self.env, list[Sliced](), self.remat
        for key in remat.passed(forward):
            own = key.loop == forward.id
            pairs.append(self._part(self._kept[key], key.tensor if own else None))
            self._kept.update({} if own else {key: pairs[-1].inner})
        wanted, stacks = remat.own(forward, forward), {inner: outer for outer, inner in forward.sliced}
        if remat.again(forward):
            wanted &= {forward.index, *stacks}  # its nodes make the rest
        else:
            stacks.update((i, o) for i, o in forward.saved.items() if not remat.unsaved(i))
        assert forward.index is not None and block.index is not None
        here = {**block.captured, forward.index: block.index}
        for t in sorted(wanted):
            if here.get(t) in env:
                env[t] = env[here[t]]
            elif t in stacks:
                pairs.append(self._part(self.lying(stacks[t]), t))
        return pairs

    def _recompute(self, forward: Block) -> None:
        """Runs the needed part of the forward body inside the backward body."""
        with having(self, run=loop_name(forward, self.graph) or ""):
            for node in self.remat.second(forward).nodes:
                if node.body is not None:
                    self._load_for(node, {key.tensor for key in self.remat.passed(forward)})
                self.node(node)

    def _load_for(self, node: Node, kept: Set[int]) -> None:
        """Brings what was kept on the hosts and a loop, or a branch, reads before that begins: once for the
        body around."""
        self.origin = Origin(node.index, node.scope, Phase.RECOMPUTE)
        for tensor in sorted(reads(node) & kept):
            self.env[tensor] = self.on_device(self.env[tensor])

    def _bring(self, block: Block) -> None:
        """Before a backward loop: what second runs inside need without work from the body around."""
        if block.parent is None or not self.remat.names:
            return
        around, env = self.graph.blocks[block.parent], self.env
        there, nodes = self.remat.brought(around, block)
        env.update((t, env[now]) for t, now in there.items() if now in env)
        with having(self, run=beside(around)):
            for node in nodes:
                self.node(node)

    # -- stacks and their parts ------------------------------------------------------------------------------

    def _over(self, block: Block) -> Axes:
        """The axes that the iterations of a loop are spread over: the stages of a pipeline."""
        assert block.dim is not None
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

    def _part(self, outer: int, inner: int | None) -> Sliced:
        v = self.values[outer]
        shape, splits = _part_of(v.shape), v.splits[1:]
        size = None if inner is None else several(self.graph.tensor(inner).shape, v.shape)
        if size is not None:
            shape, splits = _stack_of(size, shape), ((), *splits)
        part = self.new(TensorType(shape, v.dtype), splits, v.partial, host=v.host)
        if inner is not None:
            self.bind(inner, part)
        return Sliced(outer, part)

    def _outer(self, id: int, stack: Block | None, whole: Shape | None = None) -> int:
        """A new value for what a loop makes of a body's; `whole`: of a stack of which an iteration gives
        several elements, or that is longer than the loop."""
        v = self.values[id]
        if stack is None:
            return self.like(v, v.splits, v.partial)
        assert stack.dim is not None
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
