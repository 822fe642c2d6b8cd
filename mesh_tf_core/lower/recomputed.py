"""The step in which loops are recomputed: one transform of the graph's blocks, before any layout is known.

A loop saves what the policies say, and the body of a recomputed loop's backward begins with copies of the
nodes that make the rest: ordinary nodes, of phase `recompute`. They have the numbers of the nodes that they
copy, and of their tensors, since prices and rules of memory are about the model's operations. Stacks that the
model lacks have numbers below -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from functools import cached_property

from mesh_tf_core.ir.blocks import TICK, Block, KnownTensor, Node, loop_name, per_graph, reads
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.lower.remat_policy import SETS, Policies, Recomputed, Sets, means_something
from mesh_tf_core.lower.rematerialization import (
    NOTHING,
    Rematerialization,
    beside,
    check_recompute,
    running_again,
    saving_loops,
)
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.virtual_stages import WHOLE_STAGE, Again

Pairs = list[tuple[int, int]]
"""Tensors of a body, each with what its loop makes of it."""


def recomputed(graph: Graph, recompute: Policies, unread: frozenset[int] = NOTHING) -> RecomputedStep:
    """The step under some policies, computed once per graph."""
    key = RecomputedStep, recompute, unread
    return graph.remembered(key, lambda: RecomputedStep(graph, recompute, unread))


class RecomputedStep(Rematerialization):
    """The recomputation of a graph under some policies, and its blocks then."""

    @cached_property
    def root(self) -> Block:
        """All nodes; loops and their bodies have the numbers of the graph's."""
        root = self.graph.blocks[0]
        return replace(root, nodes=list(self._nodes(root))) if self.recompute else root

    def saves(self, block: Block, run: str = "") -> Pairs:
        """The stacks that a loop saves for its backward: what that reads. Or for second runs: the state at
        the beginning of every iteration, as far as it is read again, and what is kept; for loops inside that
        run again, what they keep and read.

        Args:
          run: "" for the first run; else the loops (`loop_name`) whose second run it is in.
        """
        if self.run_of(block) != run:
            return []
        own = () if self.again(block) else ((i, o) for i, o in block.saved.items() if not self.unsaved(i))
        return [*self.read_again(own, block, run), *self.passed(block)]

    def read_again(self, pairs: Iterable[tuple[int, int]], block: Block, run: str) -> Pairs:
        """The pairs of a loop that a second run makes: those that it reads itself, or backward."""
        named = (b for b in self.graph.around(block) if loop_name(b, self.graph) == run)
        around = next(named, None) if run else None
        read = None if around is None else self.second(around).read
        return [(i, o) for i, o in pairs if not run or (read is not None and o in read)]

    def parts(self, block: Block, run: str = "") -> list[tuple[int, int, RecomputedStep]]:
        """A loop's iterations in parts that are recomputed alike, in the order in which they run: first
        element, number, and how. A second run is of those that have one."""
        forward, size = block.forward or block, block.dim.size
        name = loop_name(forward, self.graph)
        asked = next((each for each in self.recompute if each.only and each.dim == name), None)
        if asked is None or not self.again(forward):
            return [(0, size, self)]
        rest = self.recompute - {asked}
        again, once = (recomputed(self.graph, each, self.unread) for each in (rest | {asked.whole}, rest))
        parts = [(0, asked.only, again), (asked.only, size - asked.only, once)]
        return parts[:1] if run else parts[:: -1 if block.reverse else 1]

    # -- bodies ----------------------------------------------------------------------------------------------

    def _nodes(self, block: Block, run: str = "") -> Iterator[Node]:
        for node in block.nodes:
            if node.body is not None:
                yield from self._before(block, node)
            yield self._node(node, run)

    def _node(self, node: Node, run: str) -> Node:
        block, own, phase = node.body, node.inputs, Phase.RECOMPUTE if run else node.phase
        if block is None:
            return replace(node, phase=phase, inputs=(*(node.op.operands(own) if run else own),))
        made = [(begin, size, step._body(node, block, run)) for begin, size, step in self.parts(block, run)]
        return replace(node, phase=phase, body=in_parts(block, made))

    def _body(self, scan: Node, block: Block, run: str) -> Block:
        made = replace(block, nodes=list(self._nodes(block, run)), saved=dict(self.saves(block, run)))
        made.stacked, made.summed = (self.read_again(p, block, run) for p in (block.stacked, block.summed))
        if block.forward is not None:
            made.sliced, begin = self._backward(scan, block, block.forward)
            made.nodes[:0] = begin
            known = {node.outputs[0]: node.inputs[0] for node in begin if isinstance(node.op, KnownTensor)}
            made.runs = None if block.runs is None else known.get(block.runs, block.runs)
        return made

    def _backward(self, scan: Node, block: Block, forward: Block) -> tuple[Pairs, list[Node]]:
        """What the body of a loop's backward has of stacks, and its nodes that make the rest again."""
        again, (sliced, made) = self.again(forward), self._stacks(block, forward)
        there, kept = {block.index, *block.carry_in, *(inner for _, inner in sliced)}, self.passed(forward)
        sliced += [(stack, tensor) for tensor, stack in kept]
        wanted, stacks = self.own(forward, forward), {inner: outer for outer, inner in forward.sliced}
        if again:
            wanted &= {forward.index, *stacks}  # its nodes make the rest
        else:
            stacks.update((i, o) for i, o in forward.saved.items() if not self.unsaved(i))
        names = list[Node]()
        for t in sorted(wanted):
            now = block.index if t == forward.index else block.captured.get(t)
            if now is not None and now in there:
                names.append(_known(scan, now, t))
            elif t in stacks:
                sliced.append((stacks[t], t))
        copies = list(self._copies(forward, {tensor for tensor, _ in kept})) if again else []
        at = copies[-1] if copies else scan
        ends = [_known(at, t, inner, loads=True) for inner, t in made.items() if not self.unsaved(t)]
        return sliced, [*names, *copies, *ends]

    def _stacks(self, block: Block, forward: Block) -> tuple[Pairs, dict[int, int]]:
        """The stacks of which a backward body has parts as in the graph; and the parts that it makes again ->
        tensors of the forward body."""
        saved, around = {o: i for i, o in forward.saved.items()}, self.graph.outside(block)
        then = {now: then for then, now in around.captured.items()}
        sliced, made = Pairs(), dict[int, int]()
        for outer, inner in block.sliced:
            tensor = saved.get(then.get(outer, outer))
            if tensor is not None and self.again(forward):
                made[inner] = tensor
            elif tensor is None or not self.unsaved(tensor):
                sliced.append((outer, inner))
        return sliced, made

    def _copies(self, forward: Block, kept: Set[int]) -> Iterator[Node]:
        """The nodes of a body that run again; a loop reads what lay on the hosts, loaded once for the body
        around."""
        for node in self.second(forward).nodes:
            copy = self._node(node, loop_name(forward, self.graph) or "")
            for t in sorted(reads(node) & kept) if node.body is not None else ():
                yield _known(copy, t, t, loads=True)
            yield copy

    def _before(self, around: Block, scan: Node) -> Iterator[Node]:
        """Before a backward loop: what second runs inside need without work from the body around."""
        assert scan.body is not None
        there, nodes = self.brought(around, scan.body) if self.recompute else ({}, ())
        yield from (_known(scan, now, t) for t, now in there.items())
        yield from (self._node(node, beside(around)) for node in nodes)


@per_graph
def keep_sets(graph: Graph, dim: str, sets: Sets = SETS) -> Sets:
    """Those of some sets that loops over a dimension may keep when recomputed, except sets that leave no
    work, that keep the same values as an earlier set, or that contain a name of nothing there."""
    blocks = saving_loops(graph, dim)
    found: dict[tuple[frozenset[int], ...], tuple[str, ...]] = {}
    for keep in (k for k in sets if all(means_something(word, blocks, graph) for word in k)):
        step = recomputed(graph, frozenset({Recomputed(dim, keep)}))
        kept = tuple(step.second(block).kept for block in blocks)
        again = (n for b, k in zip(blocks, kept, strict=True) for n in running_again(b, kept=k))
        if any(kept) and not all(n.op.free for n in again):
            found.setdefault(kept, keep)
    return tuple(found.values())


def layers_again(graph: Graph, asked: Recomputed) -> Again:
    """The bodies of layers of stages that a policy recomputes."""
    if asked.dim == TICK:
        return WHOLE_STAGE
    check_recompute(graph, frozenset({asked}))
    every = recomputed(graph, frozenset({asked})).root.walk()
    loops = (n.body for n, _ in every if n.body is not None)
    named = [body for body in loops if loop_name(body.forward or body, graph) == asked.dim]
    parts = (
        [replace(p, dim=b.dim) for p in b.parts] or [b] for b in named if b.saved or b.forward is not None
    )
    found = [sorted(each, key=lambda body: body.begin or 0) for each in parts]
    return list(zip(*found, strict=True)) if len(found) == 2 else None


def in_parts(block: Block, made: list[tuple[int, int, Block]]) -> Block:
    """A loop in parts, each with its first element and number of iterations; as it is if it has but one."""
    if len(made) == 1 and made[0][1] == block.dim.size:
        return made[0][2]
    parts = (replace(body, dim=Dim(block.dim.name, size), begin=begin) for begin, size, body in made)
    return replace(block, parts=tuple(parts))


def _known(at: Node, tensor: int, name: int, loads: bool = False) -> Node:
    """What calls a tensor by another name; of the origin of another node."""
    return replace(at, op=KnownTensor(loads), inputs=(tensor,), outputs=(name,), body=None)
