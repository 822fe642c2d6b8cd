"""Which loops run their bodies again in backward, and what that needs besides what is saved.

A loop that runs again saves its state instead of what its backward reads. Where it is inside of another one,
which does not run again, that one stacks this state once more, with everything that the second run reads from
its own body; the backward body then begins with the parts of these stacks. What it keeps besides its state
says `kept`.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cached_property
from itertools import compress

from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.lower.kept import KINDS, SETS, Recomputed, Sets, check_kept, kept_values
from mesh_tf_core.tracing.graph import Graph

NOTHING: frozenset[int] = frozenset()


def rematerialization(graph: Graph, texts: frozenset[str]) -> Rematerialization:
    """What some texts (`kept.Recomputed`) say of a graph, worked out once."""
    return graph.remembered((Rematerialization, texts), lambda: Rematerialization(graph, texts))


class Rematerialization:
    """The loops of a graph that run again when some texts say so."""

    def __init__(self, graph: Graph, texts: frozenset[str]) -> None:
        self.graph, self.names = graph, {r.dim: r.keep for r in map(Recomputed.parse, texts)}
        self._needs: dict[int, frozenset[int]] = {}
        self._follows: dict[tuple[int, frozenset[int], bool], tuple[frozenset[int], frozenset[int]]] = {}

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

    def kept(self, block: Block, unread: frozenset[int] = NOTHING, live: bool = False) -> frozenset[int]:
        """The tensors of a loop's body that it stacks though it runs again: of those that it is to keep, what
        is read then.

        Args:
          unread: stacks of saved values that nothing reads.
          live: as in `needed_for`.
        """
        return self._again(block, unread, live)[0]

    def read_again(
        self, block: Block, unread: frozenset[int] = NOTHING, live: bool = False
    ) -> frozenset[int]:
        """The tensors that what a loop saves follows from when it runs again, kept ones included."""
        return self._again(block, unread, live)[1]

    def _again(
        self, block: Block, unread: frozenset[int], live: bool
    ) -> tuple[frozenset[int], frozenset[int]]:
        key = block.id, unread, live
        if key not in self._follows:
            keep = self.names.get(block.dim.name, ()) if block.dim is not None and self.again(block) else ()
            may = {t for t in kept_values(keep, block, self.graph) if not self.unsaved(t)}
            wanted = (t for t, stack in block.saved.items() if stack not in unread)
            read = frozenset(needed_for(wanted, block, may, live))
            self._follows[key] = read & may, read
        return self._follows[key]

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
                found |= self.read_again(loop)
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
    others cost depends on whether the loops around them run again. Of a stage that runs again for backward
    anyway nothing is decided.)"""
    again = {n.body.id for n, _ in graph.walk() if n.body is not None and n.phase == "recompute"}
    stages = {b.id for b in graph.blocks if b.id in again and b.parent and graph.blocks[b.parent].spread}
    loops = [b for b in graph.blocks if b.dim is not None and b.id not in stages and has_backward(b, graph)]
    away = {b.dim for b in loops if not stands_beside_backward(b, graph)}
    return list(dict.fromkeys(b.dim.name for b in loops if b.dim is not None and b.dim not in away))


def keep_sets(graph: Graph, dim: str, sets: Sets = SETS) -> Sets:
    """Those of some sets that loops over a dimension may keep when they run again, but for those that leave
    no work, that keep what an earlier one keeps, or that have a name of nothing there."""
    return graph.remembered((keep_sets, dim, sets), lambda: tuple(_keep_sets(graph, dim, sets)))


def _keep_sets(graph: Graph, dim: str, sets: Sets) -> list[tuple[str, ...]]:
    blocks = [b for b in graph.blocks if b.dim is not None and b.dim.name == dim and has_backward(b, graph)]
    found: dict[tuple[frozenset[int], ...], tuple[str, ...]] = {}
    for keep in sets:
        names = [word for word in keep if word not in KINDS]
        if not all(any(kept_values((name,), b, graph) for b in blocks) for name in names):
            continue
        remat = rematerialization(graph, frozenset({str(Recomputed(dim, keep))}))
        kept = tuple(map(remat.kept, blocks))
        again = (n for b, k in zip(blocks, kept, strict=True) for n in running_again(b, kept=k))
        if any(kept) and not all(n.op.free for n in again):
            found.setdefault(kept, keep)
    return list(found.values())


def check_recompute(graph: Graph, texts: Iterable[str]) -> None:
    """UserError for what no loop of the graph can do."""
    loops = {b.dim.name for b in graph.blocks if b.dim is not None}
    check_kept(texts, loops, (b for b in graph.blocks if has_backward(b, graph)), graph)


def needed_for(wanted: Iterable[int], block: Block, kept: Set[int] = NOTHING, live: bool = False) -> set[int]:
    """The tensors, also those of loops inside, that the tensors `wanted` of a block follow from, where those
    that are kept are there.

    Args:
      live: without the states of loops inside that nothing follows from: lowering makes them, and drops them
        as dead.
    """
    needed = set(wanted)
    for node in reversed(block.nodes):
        if not _makes(node, needed, kept):
            continue
        body = node.body
        if body is None:
            needed.update(node.inputs)
        else:
            leaving = (*body.stacked, *body.summed, *body.saved.items())
            ends = [i for i, outer in leaving if outer in needed]
            ends += [body.runs] if live and body.runs is not None else []
            states = [not live or o in needed for o in node.outputs[: len(body.carry_in)]]
            while True:
                inner = needed_for([*compress(body.carry_out, states), *ends], body, live=live)
                read = [s or i in inner for s, i in zip(states, body.carry_in, strict=True)]
                if read == states:
                    break
                states = read
            needed |= inner | {outer for outer, i in body.sliced if i in inner}
            needed.update(compress(node.inputs, states))
            needed |= {i for i in (body.runs, body.first) if i is not None}
    return needed


def _makes(node: Node, needed: Set[int], kept: Set[int]) -> bool:
    made = (*node.outputs, *(node.body.saved.values() if node.body else ()))
    return any(o in needed and o not in kept for o in made)


def leading_to(wanted: Iterable[int], block: Block, kept: Set[int] = NOTHING) -> list[Node]:
    """The nodes of `block` from which the tensors `wanted` follow, in order; see `needed_for`."""
    needed = needed_for(wanted, block, kept)
    return [node for node in block.nodes if _makes(node, needed, kept)]


def running_again(block: Block, unread: Set[int] = frozenset(), kept: Set[int] = NOTHING) -> list[Node]:
    """The nodes, also those of loops inside, that run a second time when a loop's body is recomputed, but for
    stacks that nothing reads."""
    wanted = (tensor for tensor, stack in block.saved.items() if stack not in unread)
    needed, found = needed_for(wanted, block, kept, live=True), list[Node]()

    def visit(inside: Block) -> None:
        for node in inside.nodes:
            if _makes(node, needed, kept):
                found.append(node)
                if node.body is not None:
                    visit(node.body)

    visit(block)
    return found
