"""The loops that are recomputed in backward, and the values they need besides the saved ones.

A recomputed loop saves its state instead of the values that its backward reads. Where it is inside of another
one, which does not run again, that one stacks this state once more, with everything that the second run reads
from its own body; the backward body then begins with the parts of these stacks. `remat_policy` decides what
it keeps besides its state.

A second run ends with the last value that backward reads, as XLA drops what is dead and PyTorch's checkpoint
stops early. Where a graph's second runs go `to_the_end`, they also make what the loop, or each module that a
policy leaves out, hands on, as a checkpoint does that is an autograd function (Megatron-LM's, DeepSpeed's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cached_property
from itertools import compress
from typing import NamedTuple

from mesh_tf_core.ir.blocks import Block, Node, backwards, loop_name
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.lower.remat_policy import Policies, check_kept, handed_on, kept_values
from mesh_tf_core.tracing.graph import Graph

NOTHING: frozenset[int] = frozenset()
Handed = Callable[[Block], Set[int]]
"""The tensors of a loop's body that it hands out for second runs of it and inside it."""


class Rerun(NamedTuple):
    """The second run of a loop's body.

    Attributes:
      kept: tensors of the body that the loop stacks, of its kept values.
      read: all tensors that the second run reads or makes, these too.
      nodes: nodes of the body that run.
    """

    kept: frozenset[int]
    read: frozenset[int]
    nodes: tuple[Node, ...]


class Rematerialization:
    """The recomputed loops of a graph under some policies.

    Args:
      unread: stacks of saved values that nothing reads, as far as it is known: second runs are without them.
    """

    def __init__(self, graph: Graph, recompute: Policies, unread: frozenset[int] = NOTHING) -> None:
        self.graph, self.recompute, self.unread = graph, recompute, unread
        self.names = {each.dim: each.keep for each in recompute}
        self._needs: dict[int, frozenset[int]] = {}
        self._follows: dict[int, Rerun] = {}
        self._passed: dict[int, list[tuple[int, int]]] = {}

    def again(self, block: Block) -> bool:
        """True if a loop's body runs again in its backward."""
        return loop_name(block, self.graph) in self.names and has_backward(block, self.graph)

    def run_of(self, block: Block) -> str:
        """The run in which a loop saves for backward: "", or the second one of the loops of this name."""
        around = self.graph.around(self.graph.outside(block))
        return next((loop_name(b, self.graph) or "" for b in around if self.again(b)), "")

    def unsaved(self, tensor: int) -> bool:
        """True if a stack of saved values is not made, for the loop that would save it runs again."""
        loop, inner = self._savers.get(tensor, (None, -1))
        return loop is not None and (self.again(loop) or self.unsaved(inner))

    def second(self, block: Block) -> Rerun:
        """The second run of a loop's body."""
        if block.id not in self._follows:
            keep = self.names.get(loop_name(block, self.graph) or "", ()) if self.again(block) else ()
            may = {t for t in kept_values(keep, block, self.graph) if not self.unsaved(t)}
            wanted = {t for t, stack in block.saved.items() if stack not in self.unread} | self.ends(block)
            wanted = {t for t in wanted if not self.unsaved(t)} | self.own(block, *self.inner(block))
            read = frozenset(needed_for(wanted, block, may, self.handed))
            nodes = (node for node in block.nodes if _makes(node, read, read & may, self.handed))
            self._follows[block.id] = Rerun(read & may, read, tuple(nodes))
        return self._follows[block.id]

    def ends(self, block: Block) -> set[int]:
        """The tensors that the second run of a loop's body makes though backward does not read them."""
        if not self.graph.to_the_end or not self.again(block):
            return set()
        keep = self.names[loop_name(block, self.graph) or ""]
        return handed_on(keep, block, self.graph) if keep else {*block.carry_out}

    def own(self, block: Block, *loops: Block) -> set[int]:
        """The tensors of a loop's own body that second runs of some `loops` need."""
        needs = (self.needs(each) for each in loops)
        return {t for found in needs for t in found if self.graph.tensor(t).block == block.id}

    def passed(self, block: Block) -> list[tuple[int, int]]:
        """The tensors that a loop stacks for second runs, each with the number of its stack, below -1: stacks
        of loops inside, and its own."""
        if self.names and block.id not in self._passed:
            inner = () if self.again(block) else self.inner(block)
            inside = [stack for body in inner for _, stack in self.passed(body)]
            tensors = (*inside, *sorted(self.handed(block)))
            self._passed[block.id] = [(t, self.graph.further_stack(block.id, t)) for t in tensors]
        return self._passed.get(block.id, [])

    def handed(self, block: Block) -> Set[int]:
        """The tensors of a loop's body that it stacks for second runs of it and inside it: of others nothing
        brings them to the backward body."""
        if self.again(block):
            kept, read, _ = self.second(block)
            return kept | read.intersection(block.carry_in)
        stacked = {t for t, stack in block.saved.items() if stack not in self.unread and not self.unsaved(t)}
        own = self.own(block, *self.inner(block)) - stacked
        return {t for t in own if not self.graph.is_free(self.graph.tensor(t), block)}

    def left(self, block: Block, run: str) -> Set[int]:
        """The tensors of a loop's body that a run of it leaves for backward, or for second runs."""
        if self.again(block) and loop_name(block, self.graph) != run:
            return self.second(block).kept
        return {t for t, stack in block.saved.items() if stack not in self.unread}

    def idle(self, scan: Node, read: Set[int]) -> set[int]:
        """The nodes of a loop's body, by their indices, that do nothing in the first run of a loop that runs
        again: second run, whose results are only saved.

        Args:
          read: results of the loop that others read.
        """
        if scan.body is None or not self.again(scan.body):
            return set()
        alone = Block(-1, nodes=[scan])
        needed = needed_for(read, alone, NOTHING, self.handed)
        runs = {node.index for node in _running(alone, needed, NOTHING, self.handed)}
        return {node.index for node, _ in scan.body.walk()} - runs

    def not_dead(self) -> frozenset[int]:
        """The nodes whose second run is no dead code, whether or not anything reads what they make."""
        if not self.graph.to_the_end:
            return NOTHING
        found = list[Node]()
        for block in filter(self.again, self.graph.blocks):
            kept = self.second(block).kept
            needed = needed_for(self.ends(block), block, kept)
            found += [node for node in block.nodes if _makes(node, needed, kept)]
        inside = (inner for inner, _ in Block(-1, nodes=found).walk())
        copied = (node for node, _ in self.graph.walk() if node.phase == Phase.RECOMPUTE)
        return frozenset(node.index for node in (*inside, *copied))

    def running(self) -> dict[str, list[Node]]:
        """The nodes that run a second time for backward: by the name of the loop whose second run they belong
        to; by `beside` for values that are computed again, without work, in the backward of a loop inside."""
        found: dict[str, list[Node]] = {}
        for block in self.graph.blocks:
            if self.again(block):
                kept, needed, _ = self.second(block)
                nodes = list(_running(block, needed, kept, self.handed))
                found.setdefault(loop_name(block, self.graph) or "", []).extend(nodes)
            elif nodes := self._brought(block):
                found[beside(block)] = nodes
        return found

    def _brought(self, block: Block) -> list[Node]:
        """The nodes of a body that are made again in its backward's, for second runs inside."""
        backs = backwards(self.graph).get(block.id, ())
        loops = ((back, node.body) for back in backs for node in back.nodes if node.body is not None)
        found = {node.index for back, loop in loops for node in self.brought(back, loop)[1]}
        return [node for node in block.nodes if node.index in found]

    def brought(self, around: Block, loop: Block) -> tuple[Mapping[int, int], list[Node]]:
        """The needs of second runs in the forward's body before a `loop` of the backward's, `around` it: the
        tensors that are there -> what stands for them; nodes that make others again, without work."""
        then, forward = around.forward, loop.forward
        if then is None or forward is None or forward.parent != then.id or self.again(then):
            return {}, []
        at = next(n for n, node in enumerate(around.nodes) if node.body and node.body.id == loop.id)
        late = {o for node in around.nodes[at:] for o in node.outputs}
        wanted = self.own(then, forward).intersection(o for node in then.nodes for o in node.outputs)
        there = {t: now for t in wanted if (now := around.captured.get(t, -1)) >= 0 and now not in late}
        free = {t for t in wanted - there.keys() if self.graph.is_free(self.graph.tensor(t), then)}
        return there, [node for node in then.nodes if free.intersection(node.outputs)]

    @cached_property
    def _savers(self) -> dict[int, tuple[Block, int]]:
        """Stack of saved values -> the loop that saves it, the tensor in its body."""
        return {o: (b, i) for b in self.graph.blocks for i, o in b.saved.items()} if self.names else {}

    @cached_property
    def _slices(self) -> dict[int, int]:
        return {inner: outer for b in self.graph.blocks for outer, inner in b.sliced} if self.names else {}

    def needs(self, loop: Block) -> frozenset[int]:
        """Tensors that second runs of `loop`, or of loops inside it, read or derive without work."""
        if not self.names:
            return NOTHING
        if loop.id not in self._needs:
            found: set[int] = set()
            if self.again(loop):
                found |= self.second(loop).read
            else:
                found.update(*(self.needs(inner) for inner in self.inner(loop)))
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
        return [b for b in bodies if not has_backward(b, self.graph, beside=True)]


def _none(_: Block) -> Set[int]:
    return NOTHING


def beside(block: Block) -> str:
    """A name for values that are computed again in the backward of loops inside a body; no loop has it."""
    return f"beside {block.id}"


def has_backward(block: Block, graph: Graph, beside: bool = False) -> bool:
    """True if a loop saves values that a loop in backward reads; `beside`: one in the same block."""
    backs = backwards(graph).get(block.id, ()) if block.saved else ()
    return any(not beside or b.parent == block.parent for b in backs)


def saving_loops(graph: Graph, dim: str) -> list[Block]:
    """The loops over a dimension that save values for a backward."""
    return [b for b in graph.blocks if loop_name(b, graph) == dim and has_backward(b, graph)]


def recomputable(graph: Graph) -> list[str]:
    """Names of the loops that may run again: all that a search decides about."""
    names = (loop_name(b, graph) for b in graph.blocks if has_backward(b, graph))
    return list(dict.fromkeys(filter(None, names)))


def check_recompute(graph: Graph, recompute: Policies) -> None:
    """UserError for a policy that no loop of the graph can follow."""
    loops = {name for b in graph.blocks if (name := loop_name(b, graph))}
    check_kept(recompute, loops, (b for b in graph.blocks if has_backward(b, graph)), graph)


def needed_for(
    wanted: Iterable[int], block: Block, kept: Set[int] = NOTHING, handed: Handed = _none
) -> set[int]:
    """The tensors, including those of inner loops, from which the tensors `wanted` of a block are computed,
    given the kept ones.

    Args:
      handed: additional results of inner loops.
    """
    needed = set(wanted)
    for node in reversed(block.nodes):
        if not _makes(node, needed, kept, handed):
            continue
        body = node.body
        if body is None:
            needed.update(node.op.operands(node.inputs))
        else:
            ends = [i for i, outer in body.handed if outer in needed]
            ends += [*handed(body)]
            ends += [] if body.runs is None else [body.runs]
            states = [o in needed for o in node.outputs[: len(body.carry_in)]]
            while True:
                inner = needed_for([*compress(body.carry_out, states), *ends], body, NOTHING, handed)
                read = [s or i in inner for s, i in zip(states, body.carry_in, strict=True)]
                if read == states:
                    break
                states = read
            needed |= inner | {outer for outer, i in body.sliced if i in inner}
            needed.update(compress(node.inputs, states))
            needed |= {i for i in (body.runs, body.first) if i is not None}
    return needed


def _makes(node: Node, needed: Set[int], kept: Set[int], handed: Handed = _none) -> bool:
    return any(o in needed and o not in kept for o in node.made) or _hands(node, handed)


def _hands(node: Node, handed: Handed) -> bool:
    """Whether a loop, or one inside of it, hands out more."""
    body = node.body
    if body is None or handed is _none:
        return False
    return bool(handed(body)) or any(_hands(inner, handed) for inner in body.nodes)


def running_again(block: Block, kept: Set[int] = NOTHING) -> list[Node]:
    """The nodes, including those of inner loops, that run a second time when a loop's body is recomputed."""
    return list(_running(block, needed_for(block.saved, block, kept), kept, _none))


def _running(block: Block, needed: Set[int], kept: Set[int], handed: Handed) -> Iterator[Node]:
    """The nodes of a body, also of loops inside, that make what is needed and is not kept."""
    for node in block.nodes:
        if _makes(node, needed, kept, handed):
            yield node
            if node.body is not None:
                yield from _running(node.body, needed, kept, handed)
