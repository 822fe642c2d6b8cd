"""The values that loops save for backward, and how backward gets them again: stacks of saved values, and
values kept for second runs, on the devices or on their hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Block, Node, reads
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Origin, Result, Sliced
from mesh_tf_core.lower.placement import check_counted
from mesh_tf_core.lower.placing import Placing
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.rematerialization import Rematerialization, beside, rematerialization
from mesh_tf_core.lower.storage import BACKWARD, SAVED
from mesh_tf_core.tracing.residuals import several
from mesh_tf_core.tracing.stage_layers import loop_name

SavedKey = int | tuple[int, "SavedKey"]
"""A value that a loop keeps for second runs: a tensor of its body, or a value that a loop inside (its id)
keeps."""


class Saving:
    """The stacks of one lowering's loops.

    Args:
      low: its state.
      recompute: the loops that backward recomputes, and the values that they keep
        (`remat_policy.Recomputed`).
      node: lowers a node.
    """

    def __init__(self, low: Placing, recompute: Policies, node: Callable[[Node], None]) -> None:
        self.low, self._node = low, node
        self.remat = rematerialization(low.graph, recompute, low.part.unread)
        self._kept: dict[int, dict[SavedKey, int]] = {}
        self._parts: dict[Rematerialization, dict[int, dict[SavedKey, int]]] = {}

    # -- in forward ------------------------------------------------------------------------------------------

    def _keeps(self, block: Block, node: Node, part: Block) -> list[Result]:
        """What recomputation saves instead in a `part` of a loop, mostly all of it: the state at the
        beginning of every iteration, as far as it is read again, and what it is to keep; for loops inside
        that run again, what they keep and read."""
        if not self.remat.names or self.remat.run_of(block) != self.low.run:
            return []
        found: dict[SavedKey, int] = {}
        for inner in self.remat.inner(block):
            kept = self._kept.get(inner.id, {})
            found.update(((inner.id, key), value) for key, value in kept.items())
        here = self.low.env.keys() - self.low.given  # what this lowering has computed
        found.update((t, self.low.value_of(t)) for t in sorted(self.remat.handed(block) & here))
        if self.remat.again(block) and self._lies_on_host(block):
            # What decides whether an iteration runs is read before it begins.
            found |= self._on_host({key: x for key, x in found.items() if key != block.runs}, node)
        self._kept[block.id] = {key: self._outer(value, part) for key, value in found.items()}
        return [Result(value, self._kept[block.id][key]) for key, value in found.items()]

    def _lies_on_host(self, block: Block) -> bool:
        name = loop_name(block, self.low.graph)
        return name is not None and self.low.oracle.row(SAVED, name, BACKWARD).host

    def _on_host(self, found: dict[SavedKey, int], node: Node) -> dict[SavedKey, int]:
        """What a loop saves, brought to the host: its state as an iteration begins, the rest as it ends."""
        code, made = self.low.code, {o for instr in self.low.code for o in instr.outputs}
        self.low.origin, at = Origin(node.index, node.scope, node.phase), len(code)
        kept = {key: self.low.kept_on_host(value) for key, value in found.items()}
        stores = code[at:]
        code[at:] = [store for store in stores if store.inputs[0] in made]
        code[:0] = [store for store in stores if store.inputs[0] not in made]
        return kept

    def _saved(self, block: Block, whole: Block, node: Node) -> list[Result]:
        """The stacks that a loop, or a part of the `whole` of it, saves for its backward."""
        if not block.saved or self.remat.again(whole) or self.remat.run_of(whole) != self.low.run:
            return []
        saved = [(i, o) for i, o in block.saved.items() if not self.remat.unsaved(i)]
        pairs = self._read_again(saved, block)
        found: dict[SavedKey, int] = {i: self.low.lying(i) for i, _ in pairs}
        if found and self._lies_on_host(block):
            found |= self._on_host({i: x for i, x in found.items() if not self.low.values[x].host}, node)
        for inner, outer in pairs:
            self.low.env[outer] = self._outer(found[inner], block, self.low.graph.tensor(outer).shape)
        return [Result(found[inner], self.low.env[outer]) for inner, outer in pairs]

    def _read_again(self, pairs: list[tuple[int, int]], block: Block) -> list[tuple[int, int]]:
        """What a loop stacks in a second run: only what that reads, or backward."""
        if not self.low.run:
            return pairs
        around = block
        while loop_name(around, self.low.graph) != self.low.run:
            if around.parent is None:
                return []
            around = self.low.graph.blocks[around.parent]
        needed = self.remat.second(around).read
        return [(i, outer) for i, outer in pairs if outer in needed]

    # -- in backward -----------------------------------------------------------------------------------------

    def _recomputed(self, block: Block, again: Sequence[tuple[int, int]]) -> list[Sliced]:
        """Runs the needed part of the forward body inside the backward body."""
        forward = block.forward
        assert forward is not None
        kept = self._kept.get(forward.id, {})
        pairs = [self._part(stack, key) for key, stack in kept.items()]
        then, needed = self._stands_for(block), self.remat.needs(forward)
        known = {then.get(outer, outer): inner for outer, inner in block.sliced}
        for outer, inner in forward.sliced:
            if known.get(outer) in self.low.env:
                self.low.env[inner] = self.low.env[known[outer]]
            elif inner in needed:
                pairs.append(self._part(self.low.lying(outer), inner))
        assert block.index is not None and forward.index is not None
        self.low.env[forward.index] = self.low.env[block.index]
        run, self.low.run = self.low.run, loop_name(forward, self.low.graph) or ""
        for node in self.remat.second(forward).nodes:
            if node.body is not None:
                self._load_for(node, kept)
            self._node(node)
        self.low.run = run
        for tensor, inner in again:
            if not self.remat.unsaved(tensor):
                self.low.env[inner] = self.low.value_of(tensor)
        return pairs

    def _load_for(self, node: Node, kept: Iterable[SavedKey]) -> None:
        """Brings what was kept on the hosts and a loop, or a branch, reads before that begins: once for the
        body around."""
        self.low.origin = Origin(node.index, node.scope, Phase.RECOMPUTE)
        for tensor in sorted(reads(node).intersection(key for key in kept if isinstance(key, int))):
            self.low.env[tensor] = self.low.on_device(self.low.env[tensor])

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
        run, self.low.run = self.low.run, beside(then)
        for node in then.nodes:
            missing = False
            for t in wanted.intersection(node.outputs):
                if now.captured.get(t) in self.low.env:
                    self.low.env[t] = self.low.env[now.captured[t]]
                else:
                    missing = missing or graph.is_free(graph.tensor(t), then)
            if missing:
                self._node(node)
        self.low.run = run

    def _unpacked(self, block: Block, forward: Block) -> list[Sliced]:
        """One iteration's part of what the forward loop keeps for loops inside that run again."""
        pairs: list[Sliced] = []
        for key, stack in self._kept.get(forward.id, {}).items():
            pairs.append(self._part(stack, key))
            if not isinstance(key, int):
                self._kept.setdefault(key[0], {})[key[1]] = pairs[-1].inner
        stacks = {inner: outer for outer, inner in forward.sliced}
        stacks.update((i, o) for i, o in forward.saved.items() if not self.remat.unsaved(i))
        for t in sorted(self.remat.own(forward)):
            if t == forward.index:
                self.low.env[t] = self.low.env[block.index]  # type: ignore[index]
            elif block.captured.get(t) in self.low.env:
                self.low.env[t] = self.low.env[block.captured[t]]
            elif t in stacks:
                pairs.append(self._part(self.low.lying(stacks[t]), t))
        return pairs

    # -- stacks and their parts ------------------------------------------------------------------------------

    def _over(self, block: Block) -> Axes:
        """The axes that the iterations of a loop are spread over: the stages of a pipeline."""
        assert block.dim is not None
        layout, name, ways = self.low.layout, block.dim.name, self.low.oracle.ways
        axes, further = layout.axes(name), layout.further(name)
        check_counted(layout, name, further if block.spread or ways(axes) == 1 else (*axes, *further))
        if not block.spread:
            return ()
        if ways(axes) != block.dim.size:
            found = f"{'+'.join(axes)} has {ways(axes)}" if axes else "no rule splits it"
            raise LayoutError(
                f"layout {self.low.layout}: {block.dim.name!r} must be split over exactly {block.dim.size} "
                f"devices, but {found}"
            )
        return axes

    def _part(self, outer: int, inner: SavedKey) -> Sliced:
        v = self.low.values[outer]
        shape, splits = _part_of(v.shape), v.splits[1:]
        size = several(self.low.graph.tensor(inner).shape, v.shape) if isinstance(inner, int) else None
        if size is not None:
            shape, splits = _stack_of(size, shape), ((), *splits)
        part = self.low.new(TensorType(shape, v.dtype), splits, v.partial, host=v.host)
        if isinstance(inner, int):
            self.low.bind(inner, part)
        return Sliced(outer, part)

    def _outer(self, id: int, stack: Block | None, whole: Shape | None = None) -> int:
        """A new value for what a loop makes of a body's; `whole`: of a stack of which an iteration gives
        several elements, or that is longer than the loop."""
        v = self.low.values[id]
        if stack is None:
            return self.low.like(v, v.splits, v.partial)
        assert stack.dim is not None
        over = self._over(stack)
        if stack.dim != self.low.graph.blocks[stack.id].dim:
            whole = None  # of a part of the loop
        dim, shape, splits = stack.dim if whole is None else whole.dims[0], v.shape, v.splits
        if whole is not None and several(shape, whole) is not None:
            shape, splits = _part_of(shape), splits[1:]
        return self.low.new(
            TensorType(_stack_of(dim, shape), v.dtype), (over, *splits), v.partial, host=v.host
        )


@lru_cache(maxsize=1 << 14)
def _stack_of(dim: Dim, shape: Shape) -> Shape:
    return Shape((dim, *shape))


@lru_cache(maxsize=1 << 14)
def _part_of(stack: Shape) -> Shape:
    return Shape(stack.dims[1:])
