"""The graph of a lowered program, as plain data: cost models read it in addition to the instructions.

Which operations a compiler may run as one kernel, and in which ticks the stages of a pipeline work, follows
from the model's operations and loops, not from their pieces. A graph may grow after it was lowered and
depends on its construction; an outline does not change and can be saved (`written`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.phase import Phase

T = TypeVar("T")


class Remembering:
    """The blocks of a graph or outline, with a cache of what follows from them: an outline's forever, a
    graph's until it changes.

    Attributes:
      blocks: the graph itself first, then the bodies of loops.
    """

    blocks: Sequence[Block]
    _remembered: dict[Hashable, Any]

    @property
    def nodes(self) -> list[Node]:
        """The nodes outside of loops."""
        return self.blocks[0].nodes

    def walk(self) -> Iterator[tuple[Node, int]]:
        """Every node once, with how often it runs in a step."""
        return self.blocks[0].walk()

    def outside(self, loop: Block) -> Block:
        """The block around a loop's body."""
        return self.blocks[loop.parent or 0]

    def around(self, block: Block) -> Iterator[Block]:
        """The loops' bodies that a block is in, itself first; the graph is none."""
        while block.parent is not None:
            yield block
            block = self.blocks[block.parent]

    def further_stack(self, block: int, tensor: int) -> int:
        """The number, below -1, of a stack of a body's tensor that the graph itself lacks."""
        numbers: dict[tuple[int, int], int] = self.remembered(Remembering.further_stack, dict)
        return numbers.setdefault((block, tensor), -2 - len(numbers))

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, which follows from the graph and `key` alone, worked out once."""
        if key not in self._remembered:
            self._remembered[key] = make()
        found: T = self._remembered[key]
        return found


G = TypeVar("G", bound=Remembering)


def per_graph(make: Callable[[G], T]) -> Callable[[G], T]:
    """Makes a function of a graph or outline work its answer out once for each."""

    @wraps(make)
    def known(graph: G) -> T:
        return graph.remembered(make, lambda: make(graph))

    return known


@per_graph
def loop_dims(graph: Remembering) -> Mapping[str, list[Node]]:
    """The dimensions that forward loops run over -> these loops."""
    found: dict[str, list[Node]] = {}
    for node, _ in graph.walk():
        if node.phase == Phase.FORWARD and node.body is not None:
            found.setdefault(node.body.dim.name, []).append(node)
    return found


@per_graph
def backwards(graph: Remembering) -> Mapping[int, list[Block]]:
    """Loops, by the numbers of their bodies -> the bodies of their backward."""
    found: dict[int, list[Block]] = {}
    for block in graph.blocks:
        if block.forward is not None:
            found.setdefault(block.forward.id, []).append(block)
    return found


def layers_of_stage(dim: str) -> str:
    """The dimension of the loop over the layers of a stage, of those that `dim` counts."""
    return f"{dim}_of_stage"


def loop_name(block: Block, graph: Remembering) -> str | None:
    """The name for recomputing a loop: its dimension's, or for the layers of a stage that of all layers,
    whatever their split. None: of stages themselves, which are no loop."""
    if block.parent is None or block.spread:
        return None
    around = graph.outside(block)
    of_stage = around.spread and block.dim.name == layers_of_stage(around.dim.name)
    return around.dim.name if of_stage else block.dim.name


@dataclass(frozen=True, slots=True)
class Outlined:
    """A tensor: its type, and the block whose operations compute it."""

    type: TensorType
    block: int

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype


@dataclass(frozen=True, eq=False)
class Outline(Remembering):
    """Nodes, blocks and tensors of a graph, under the numbers that they have there.

    Attributes:
      tensors: by id.
      gradient_of: tensor -> the variable of the gradient.
      variables: names of all.
    """

    blocks: tuple[Block, ...]
    tensors: tuple[Outlined, ...]
    gradient_of: Mapping[int, str]
    variables: frozenset[str]
    _remembered: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        blocks: Sequence[Block],
        tensors: tuple[Outlined, ...],
        gradient_of: Mapping[int, str],
        variables: frozenset[str],
    ) -> Outline:
        """A copy of an outline with blocks of its own, which later changes of the graph do not affect; it
        lacks what only gradients need."""
        own = [replace(b, nodes=[], forward=None, captured={}, halves=()) for b in blocks]
        for block, copy in zip(blocks, own, strict=True):
            copy.nodes = [n if n.body is None else replace(n, body=own[n.body.id]) for n in block.nodes]
            copy.sliced, copy.stacked, copy.summed = [*block.sliced], [*block.stacked], [*block.summed]
            copy.saved = dict(block.saved)
        return cls(tuple(own), tensors, dict(gradient_of), variables)

    def tensor(self, id: int) -> Outlined:
        """The tensor of a number."""
        return self.tensors[id]

    @cached_property
    def producer(self) -> Mapping[int, Node]:
        """Tensor -> the node that makes it."""
        return {o: node for block in self.blocks for node in block.nodes for o in node.outputs}


NO_OUTLINE = Outline((Block(0),), (), {}, frozenset())
"""The outline of a program that was written by hand."""
