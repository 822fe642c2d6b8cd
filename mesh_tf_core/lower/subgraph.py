"""Choose what lowering covers: a whole graph, or a part alone with everything around it given."""

from __future__ import annotations

from collections.abc import Container, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.graph import Graph

IdPairs = tuple[tuple[int, int], ...]
Access = tuple[int, Phase, int]
"""The place where a variable is read in the layout's splits: id of a block, the pass, one of its tensors."""


@dataclass(frozen=True)
class Twin:
    """A tensor of a second run that backward has, too, as `twin`; `readers` read it there."""

    tensor: int
    twin: int
    readers: tuple[Node, ...] = field(hash=False)


class Whole:
    """All of a graph.

    Attributes:
      alone: it is a part: values of other nodes are given, and no result is known to be unused. again,
        beside, unread: see `Subgraph`.
    """

    alone: ClassVar[bool] = False
    again: str = ""
    beside: tuple[Twin, ...] = ()
    unread: frozenset[int] = frozenset()

    def has(self, nodes: Set[int]) -> bool:
        """True if some of these nodes are lowered."""
        return True

    def within(self, block: Block) -> Sequence[Node]:
        """The nodes of a block to lower, and the loops to enter."""
        return block.nodes

    def natural_in(self, block: Block) -> Sequence[tuple[Phase, int]]:
        """The phases and tensors of `Subgraph.natural` in a block."""
        return ()

    def takes(self, block: Block, known: Container[int]) -> Sequence[tuple[int, int]]:
        """The parts of stacks that a loop's body is given: (stack, part).

        Args:
          known: tensors that already have a value.
        """
        return block.sliced

    def made(self, scan: Node, graph: Graph) -> tuple[IdPairs, IdPairs, IdPairs]:
        """The stacks, sums and saved values that a loop makes of lowered nodes' results."""
        block = scan.body
        assert block is not None
        return tuple(block.stacked), tuple(block.summed), tuple(block.saved.items())

    def computes(self, tensor: int, scan: Node, graph: Graph) -> bool:
        """True if a lowered node computes a tensor in the body of `scan`."""
        return True


WHOLE = Whole()


@dataclass(frozen=True)
class Subgraph(Whole):
    """Lowers only these nodes (by index); values of other nodes are given, in default sharding.

    Attributes:
      nodes: the nodes to lower.
      blocks: ids of the loop bodies that hold some of it.
      natural: (block, phase, tensor): also bring a tensor into its natural sharding at the end of a block, as
        its readers of this phase would.
      again: the part is a second run in the backward of loops with this name (`rounds.loop_name`), or belongs
        to one (`rematerialization.beside`).
      early: tensors that nodes outside the part also read before the update: a sum of them is neither delayed
        further nor combined with other messages.
      beside: for a second run, tensors that backward also reads and may already have moved; the second run
        reuses them.
      unread: stacks that nothing reads in the whole graph: no loop makes them.
    """

    alone: ClassVar[bool] = True
    nodes: frozenset[int]
    blocks: frozenset[int]
    natural: frozenset[Access] = frozenset()
    again: str = ""
    early: frozenset[int] = frozenset()
    beside: tuple[Twin, ...] = ()
    unread: frozenset[int] = frozenset()
    _by_block: dict[int, tuple[tuple[Phase, int], ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _visits: dict[int, list[Node]] = field(default_factory=dict, compare=False, repr=False)
    _reads: dict[int, frozenset[int]] = field(default_factory=dict, compare=False, repr=False)
    _made: dict[int, tuple[IdPairs, IdPairs, IdPairs]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def without(self, nodes: Set[int]) -> Subgraph:
        """The same without some nodes."""
        return replace(self, nodes=self.nodes - nodes, _by_block={}, _visits={}, _reads={}, _made={})

    def returned(self, graph: Graph) -> dict[str, Tensor]:
        """`early`, as results of a program."""
        return {f"%{t}": graph.tensor(t) for t in sorted(self.early)}

    def has(self, nodes: Set[int]) -> bool:
        return not self.nodes.isdisjoint(nodes)

    def within(self, block: Block) -> Sequence[Node]:
        if block.id not in self._visits:
            self._visits[block.id] = [
                n
                for n in block.nodes
                if n.index in self.nodes or (n.body is not None and n.body.id in self.blocks)
            ]
        return self._visits[block.id]

    def natural_in(self, block: Block) -> Sequence[tuple[Phase, int]]:
        if block.id not in self._by_block:
            self._by_block[block.id] = tuple(sorted((p, t) for b, p, t in self.natural if b == block.id))
        return self._by_block[block.id]

    def takes(self, block: Block, known: Container[int]) -> Sequence[tuple[int, int]]:
        reads = self._read_in(block)
        return [(outer, inner) for outer, inner in block.sliced if inner in reads or outer in known]

    def _read_in(self, block: Block) -> frozenset[int]:
        """The tensors that the kept nodes of a block read."""
        if block.id not in self._reads:
            kept = (n for n in block.nodes if n.index in self.nodes)
            found = (*(i for n in kept for i in n.inputs), *(t for _, t in self.natural_in(block)))
            self._reads[block.id] = frozenset(found)
        return self._reads[block.id]

    def made(self, scan: Node, graph: Graph) -> tuple[IdPairs, IdPairs, IdPairs]:
        block = scan.body
        assert block is not None
        if block.id not in self._made:
            stacked, summed, saved = (
                tuple(
                    (i, o) for i, o in pairs if o not in self.unread and _source(i, scan, graph) in self.nodes
                )
                for pairs in (block.stacked, block.summed, block.saved.items())
            )
            self._made[block.id] = stacked, summed, saved
        return self._made[block.id]

    def computes(self, tensor: int, scan: Node, graph: Graph) -> bool:
        return _source(tensor, scan, graph) in self.nodes


def made_by(node: Node, graph: Graph) -> tuple[int, ...]:
    """The tensors that a node computes itself; its body's nodes compute the loop's other results."""
    return node.outputs if node.body is None else made_by_loop(node, graph)


def made_by_loop(scan: Node, graph: Graph) -> tuple[int, ...]:
    """The tensors that a loop itself makes: final carries, and stacks of values that it only passes on."""
    block = scan.body
    assert block is not None
    passed = (o for i, o in (*block.stacked, *block.summed) if _source(i, scan, graph) == scan.index)
    return (*scan.outputs[: len(block.carry_in)], *passed)


def _source(tensor: int, scan: Node, graph: Graph) -> int:
    """The node that computes a tensor in the body of `scan`: what loops inside hand out belongs to the node
    that computes it in them; a loop's own state, and what it only takes from outside, to the loop."""
    assert scan.body is not None
    if graph.tensor(tensor).block != scan.body.id:
        return scan.index
    producer = graph.producer.get(tensor, scan)
    inner = {o: n for n in scan.body.nodes if n.body is not None for o in n.body.saved.values()}
    loop = inner.get(tensor, producer)
    if loop.body is None or loop is scan:
        return producer.index
    made = {o: i for i, o in (*loop.body.stacked, *loop.body.summed, *loop.body.saved.items())}
    return _source(made[tensor], loop, graph) if tensor in made else loop.index
