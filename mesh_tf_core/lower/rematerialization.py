"""Which loops run their bodies again in backward, and what that needs besides what is saved.

A loop that runs again saves its state instead of what its backward reads. Where it is inside of another one,
which does not run again, that one stacks this state once more, with everything that the second run reads from
its own body; the backward body then begins with the parts of these stacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cached_property

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.tracing.graph import Graph


class Rematerialization:
    """The loops of a graph that run again when those over the dimensions `names` do."""

    def __init__(self, graph: Graph, names: frozenset[str]) -> None:
        self.graph, self.names = graph, names
        self._needs: dict[int, frozenset[int]] = {}

    def again(self, block: Block) -> bool:
        """Whether a loop's body runs again in its backward."""
        return block.dim is not None and block.dim.name in self.names and has_backward(block, self.graph)

    def around(self, block: Block) -> bool:
        """Whether a loop is inside of one that runs again."""
        if block.parent is None:
            return False
        outer = self.graph.blocks[block.parent]
        return self.again(outer) or self.around(outer)

    def unsaved(self, tensor: int) -> bool:
        """Whether a stack of saved values is not made, for the loop that would save it runs again."""
        loop, inner = self._savers.get(tensor, (None, -1))
        return loop is not None and (self.again(loop) or self.unsaved(inner))

    @cached_property
    def _savers(self) -> dict[int, tuple[Block, int]]:
        """Stack of saved values -> the loop that saves it, the tensor in its body."""
        return {o: (b, i) for b in self.graph.blocks for i, o in b.saved.items()} if self.names else {}

    @cached_property
    def _slices(self) -> dict[int, int]:
        return {inner: outer for b in self.graph.blocks for outer, inner in b.sliced} if self.names else {}

    def needs(self, loop: Block) -> frozenset[int]:
        """Tensors that second runs, of `loop` or of loops inside of it, read or follow from without work."""
        if not self.names:
            return frozenset()
        if loop.id not in self._needs:
            found: set[int] = set()
            if self.again(loop):
                found |= needed_for(loop.saved, loop)
            else:
                found.update(*map(self.needs, self.inner(loop)))
            todo = list(found)
            for t in todo:
                new = {self._slices[t]} if t in self._slices else set(self._free_inputs(t))
                todo += new - found
                found |= new
            self._needs[loop.id] = frozenset(found)
        return self._needs[loop.id]

    def _free_inputs(self, tensor: int) -> tuple[int, ...]:
        """What a loop body's tensor follows from, if that takes no work."""
        t, node = self.graph.tensor(tensor), self.graph.producer.get(tensor)
        return node.inputs if node and t.block and self.graph.is_free(t, self.graph.blocks[t.block]) else ()

    def inner(self, loop: Block) -> list[Block]:
        """The loops of a body whose backward is in another body."""
        bodies = (n.body for n in loop.nodes if n.body is not None)
        return [b for b in bodies if not stands_beside_backward(b, self.graph)]

    def of_body(self, block: Block) -> list[int]:
        """The tensors of a loop's own body that second runs inside of it need."""
        if self.again(block):
            return []
        return sorted(t for t in self.needs(block) if self.graph.tensor(t).block == block.id)

    def stacked(self, tensor: int, block: Block) -> bool:
        """Whether a tensor `of_body` must be stacked for it: nothing else brings it to the backward body."""
        saved = tensor in block.saved and not self.unsaved(tensor)
        return not saved and not self.graph.is_free(self.graph.tensor(tensor), block)


def has_backward(block: Block, graph: Graph) -> bool:
    """Whether a loop saves values that a loop in backward reads."""
    return bool(block.saved) and any(b.forward is block for b in graph.blocks)


def stands_beside_backward(block: Block, graph: Graph) -> bool:
    """Whether a loop's body can run again in its backward: both loops are in the same block."""
    return bool(block.saved) and any(b.forward is block and b.parent == block.parent for b in graph.blocks)


def recomputable(graph: Graph) -> list[str]:
    """Dimensions that a search decides about: of loops that are all in one body with their backward. (What
    others cost depends on whether the loops around them run again.)"""
    loops = [b for b in graph.blocks if b.dim is not None and has_backward(b, graph)]
    away = {b.dim for b in loops if not stands_beside_backward(b, graph)}
    return list(dict.fromkeys(b.dim.name for b in loops if b.dim is not None and b.dim not in away))


def check_recompute(graph: Graph, names: Iterable[str]) -> None:
    """UserError for a dimension that no loop runs over."""
    loops = {b.dim.name for b in graph.blocks if b.dim is not None}
    for name in names:
        if name not in loops:
            raise UserError(f"recompute {name!r}: no loop runs over it; {known_names(name, loops)}")


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


def running_again(block: Block, unread: Set[int] = frozenset()) -> list[Node]:
    """The nodes, also those of loops inside, that run a second time when a loop's body is recomputed, but for
    stacks that nothing reads."""
    wanted = (tensor for tensor, stack in block.saved.items() if stack not in unread)
    needed, found = needed_for(wanted, block), list[Node]()

    def visit(inside: Block) -> None:
        for node in inside.nodes:
            if _makes(node, needed):
                found.append(node)
                if node.body is not None:
                    visit(node.body)

    visit(block)
    return found
