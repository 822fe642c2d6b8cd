"""Base lowering of loops: bodies, what crosses their border, forward bodies that run again in backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mesh_tf_core.blocks import Block, Node
from mesh_tf_core.dims import Shape
from mesh_tf_core.errors import LayoutError, UserError, known_names
from mesh_tf_core.op import TensorType
from mesh_tf_core.program import make_loop

if TYPE_CHECKING:
    from mesh_tf_core.graph import Graph
    from mesh_tf_core.lower.base import Lowering


class Loops:
    """Lowers the loops of one lowering; `low` is its state."""

    def __init__(self, low: Lowering) -> None:
        self.low = low
        self._carry_stacks: dict[int, dict[int, int]] = {}

    def loop(self, node: Node) -> None:
        block, origin = node.body, self.low.origin
        assert block is not None and block.dim is not None
        if self.low.layout.axes(block.dim.name):
            raise LayoutError(
                f"layout {self.low.layout}: {block.dim.name!r} counts the iterations of a loop and cannot "
                f"be split over {'+'.join(self.low.layout.axes(block.dim.name))}; drop this rule"
            )
        whole = self.low.keep is None or node.index in self.low.keep.nodes
        decides = block.runs if whole else None
        inputs, starts = (node.inputs, block.carry_in) if whole else ((), ())
        init = [self.low.at_home(self.low.value_of(i)) for i in inputs]
        outer_code, self.low.code = self.low.code, []
        outer_memory = self.low.moved, self.low.cast
        self.low.moved, self.low.cast = {}, {}
        index = self.low.new(self.low.graph.tensor(block.index).type, ())  # type: ignore[arg-type]
        self.low.env[block.index] = index  # type: ignore[index]
        carry_in = []
        for tensor, start in zip(starts, init, strict=True):
            v = self.low.values[start]
            self.low.env[tensor] = self.low.new(TensorType(v.shape, v.dtype), v.splits)
            carry_in.append(self.low.env[tensor])
        sliced = self._sliced(block)
        runs = None if decides is None else self.low.value_of(decides)
        self.low.nodes(block)
        carry_out = [self.low.at_home(self.low.value_of(t)) for t in block.carry_out] if whole else []
        finals = [self._outer(v, None) for v in carry_in]
        pairs = self._read_again([*block.stacked, *self._saves(block)], block)
        stacked = [self._stack(block, inner, outer) for inner, outer in pairs if self._here(inner, node)]
        if self._recomputes(block):
            stacked += self._carries(block, starts)
        summed = []
        for inner, outer in block.summed:
            if self._here(inner, node):
                value = self._scattered(self.low.value_of(inner), self.low.graph.gradient_of.get(outer))
                self.low.env[outer] = self._outer(value, None)
                summed.append((value, self.low.env[outer]))
        body, self.low.code = tuple(self.low.code), outer_code
        self.low.moved, self.low.cast = outer_memory
        self.low.env.update(zip(node.outputs, finals, strict=False))
        carried = tuple(zip(init, carry_in, carry_out, finals, strict=True))
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

    def _here(self, tensor: int, scan: Node) -> bool:
        """Whether this lowering computes a body tensor (a loop's own carries belong to its scan)."""
        keep = self.low.keep
        return keep is None or keep.source(tensor, scan, self.low.graph) in keep.nodes

    def _sliced(self, block: Block) -> list[tuple[int, int]]:
        """Parts of stacked values; with recomputation, saved values are computed anew instead."""
        pairs = []
        saved = {o: i for i, o in block.forward.saved.items()} if block.forward else {}
        again: list[tuple[int, int]] = []
        for outer, inner in block.sliced:
            forward = block.forward if self.low.keep is None else None
            if outer in saved and forward and self._recomputes(forward):
                again.append((saved[outer], inner))
                continue
            if self.low.keep is not None and outer not in self.low.env and not self._used(block, inner):
                continue
            pairs.append(self._part(self.low.value_of(outer), inner))
        if again:
            pairs += self._recomputed(block, again)
        return pairs

    def _used(self, block: Block, tensor: int) -> bool:
        assert self.low.keep is not None
        return tensor in self.low.keep.reads(block)

    def _part(self, outer: int, inner: int) -> tuple[int, int]:
        v = self.low.values[outer]
        part = self.low.new(TensorType(Shape(v.shape.dims[1:]), v.dtype), v.splits[1:], v.partial)
        self.low.bind(inner, part)
        return outer, part

    def _recomputed(self, block: Block, again: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Runs the needed part of the forward body inside the backward body."""
        forward = block.forward
        assert forward is not None
        pairs = []
        for tensor, stack in self._carry_stacks[forward.id].items():
            pairs.append(self._part(stack, tensor))
        known = dict(block.sliced)
        for outer, inner in forward.sliced:
            if known.get(outer) in self.low.env:
                self.low.env[inner] = self.low.env[known[outer]]
            else:
                pairs.append(self._part(self.low.value_of(outer), inner))
        assert block.index is not None and forward.index is not None
        self.low.env[forward.index] = self.low.env[block.index]
        for node in leading_to([tensor for tensor, _ in again], forward):
            self.low.node(node, again=True)
        for tensor, inner in again:
            self.low.env[inner] = self.low.value_of(tensor)
        return pairs

    def _recomputes(self, block: Block) -> bool:
        """Asked for, and the loop's backward stands beside it (a loop in a recomputed body runs again as it
        is)."""
        asked = block.dim is not None and block.dim.name in self.low.recompute
        return asked and stands_beside_backward(block, self.low.graph)

    def _carries(self, block: Block, starts: Sequence[int]) -> list[tuple[int, int]]:
        """What recomputation saves instead: the state at the beginning of every iteration, as far as it is
        read again."""
        read = needed_for(block.saved, block)
        found = {t: self._outer(self.low.env[t], block) for t in starts if t in read}
        self._carry_stacks[block.id] = found
        return [(self.low.env[t], outer) for t, outer in found.items()]

    def _saves(self, block: Block) -> list[tuple[int, int]]:
        return [] if self._recomputes(block) or self._saves_later(block) else list(block.saved.items())

    def _read_again(self, pairs: list[tuple[int, int]], block: Block) -> list[tuple[int, int]]:
        """What a loop stacks when one around it is recomputed: only what backward reads. (The whole program
        drops the rest as dead.)"""
        if self.low.keep is None or not self.low.keep.again:
            return pairs
        around = block
        while around.parent is not None:
            around = self.low.graph.blocks[around.parent]
            if self._recomputes(around):
                needed = needed_for(around.saved, around)
                return [(i, outer) for i, outer in pairs if outer in needed]
        return pairs

    def _saves_later(self, block: Block) -> bool:
        """Whether a loop is inside of one that is recomputed: what it saves the first time nobody reads. (The
        whole program drops that as dead.)"""
        if self.low.keep is None or self.low.keep.again or block.parent is None:
            return False
        around = self.low.graph.blocks[block.parent]
        return self._recomputes(around) or self._saves_later(around)

    def _stack(self, block: Block, inner: int, outer: int) -> tuple[int, int]:
        value = self._scattered(self.low.value_of(inner), self.low.graph.gradient_of.get(outer))
        self.low.env[outer] = self._outer(value, block)
        return value, self.low.env[outer]

    def _scattered(self, value: int, variable: str | None) -> int:
        """A layer's part of a gradient, as its variable's state is split (from storage stage 2 on)."""
        if variable is None or self.low.storage.stage(variable) < 2:
            return value
        view = self.low.storage.view(variable)
        return self.low.placed(value, self.low.natural(self.low.values[value].shape, layout=view))

    def _outer(self, id: int, stack: Block | None) -> int:
        v = self.low.values[id]
        if stack is None:
            return self.low.new(TensorType(v.shape, v.dtype), v.splits, v.partial)
        assert stack.dim is not None
        return self.low.new(TensorType(Shape([stack.dim, *v.shape]), v.dtype), ((), *v.splits), v.partial)


def stands_beside_backward(block: Block, graph: Graph) -> bool:
    """Whether a loop's body can run again in its backward: both loops are in the same block."""
    return bool(block.saved) and any(b.forward is block and b.parent == block.parent for b in graph.blocks)


def recomputable(graph: Graph) -> list[str]:
    """Dimensions of the loops whose bodies can run again in backward."""
    found = (b for b in graph.blocks if b.dim is not None and stands_beside_backward(b, graph))
    return list(dict.fromkeys(b.dim.name for b in found if b.dim is not None))


def check_recompute(graph: Graph, names: Iterable[str]) -> None:
    """UserError for a dimension that no loop runs over, or only loops inside of others, whose values the
    loops around them save."""
    loops = {b.dim.name: b for b in graph.blocks if b.dim is not None}
    can = recomputable(graph)
    for name in names:
        if name not in loops:
            raise UserError(f"recompute {name!r}: no loop runs over it; {known_names(name, loops)}")
        inner = [b for b in graph.blocks if b.dim == loops[name].dim and b.saved]
        if name not in can and inner:
            around = graph.blocks[inner[0].parent or 0].dim
            assert around is not None
            raise UserError(
                f"recompute {name!r}: its loop is inside of the one over {around.name!r}, which saves its "
                f"values; recompute {around.name!r} instead"
            )


def needed_for(wanted: Iterable[int], block: Block) -> set[int]:
    """The tensors, also those of loops inside, that the tensors `wanted` of a block follow from."""
    needed = set(wanted)
    for node in reversed(block.nodes):
        if not _makes(node, needed):
            continue
        needed.update(node.inputs)
        body = node.body
        if body is not None:
            leaving = (*body.stacked, *body.summed, *body.saved.items())
            inner = needed_for([*body.carry_out, *(i for i, outer in leaving if outer in needed)], body)
            needed |= inner | {outer for outer, i in body.sliced if i in inner}
            needed |= set() if body.runs is None else {body.runs}
    return needed


def _makes(node: Node, needed: set[int]) -> bool:
    made = (*node.outputs, *(node.body.saved.values() if node.body else ()))
    return any(o in needed for o in made)


def leading_to(wanted: Iterable[int], block: Block) -> list[Node]:
    """The nodes of `block` from which the tensors `wanted` follow, in order."""
    needed = needed_for(wanted, block)
    return [node for node in block.nodes if _makes(node, needed)]


def running_again(block: Block) -> list[Node]:
    """The nodes, also those of loops inside, that run a second time when a loop's body is recomputed."""
    needed, found = needed_for(block.saved, block), []

    def visit(inside: Block) -> None:
        for node in inside.nodes:
            if _makes(node, needed):
                found.append(node)
                if node.body is not None:
                    visit(node.body)

    visit(block)
    return found
