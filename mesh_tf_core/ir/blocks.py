"""The parts of a graph: nodes, blocks of nodes (the graph itself, and the bodies of loops), and the
operations that connect it to the world (fed inputs, variables, loops), lowered by `lower` itself.

The outline is the graph of a lowered program as plain data, which cost models read in addition to the
instructions. Which operations a compiler may run as one kernel, and in which ticks the stages of a pipeline
work, follows from the model's operations and loops, not from their pieces. A graph may grow after it was
lowered and depends on its construction; an outline does not change and can be saved (`written`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.phase import Phase


@dataclass(frozen=True)
class Connection(Op, abstract=True):
    """Connects a graph to the world, or to the body of a loop: nothing is computed. It has no methods but its
    type, and lowering handles each."""

    kind: ClassVar[str] = "data"


@dataclass(frozen=True)
class Feed(Connection, abstract=True):
    """A tensor of the batch."""

    feed: str
    type: TensorType

    def infer(self, *inputs: TensorType) -> TensorType:
        return self.type


@dataclass(frozen=True)
class Read(Connection, abstract=True):
    """A variable's value."""

    variable: Variable

    def infer(self, *inputs: TensorType) -> TensorType:
        return self.variable.lying


@dataclass(frozen=True)
class Assign(Connection, abstract=True):
    """Stores a value into a variable."""

    variable: Variable


@dataclass(frozen=True)
class Scan(Connection, abstract=True):
    """A loop over a stacked dimension; the node's body defines an iteration."""

    dim: Dim


@dataclass(frozen=True)
class KnownTensor(Connection, abstract=True):
    """A tensor that is there, under another name; with `loads`, on the device, if it lay on its host."""

    free: ClassVar[bool] = True
    loads: bool = False


MICROBATCH = "microbatch"
"""Name of the dimension that counts the parts of a batch (see `microbatch`)."""
IN_FLIGHT = "in_flight"
"""Name of the dimension that counts the microbatches between the slots of a stage."""
ARRIVING = "arriving"
"""Name of the dimension that counts the microbatches that wait for a slot of their next stage."""
TICK = "tick"
"""Name of the dimension that counts the steps of a pipeline (see `tracing.pipelined_step`)."""

WHOLE = Dim("(graph)", 1)
"""The dimension of the graph itself, which is no loop."""
REPLICA = "replica"
"""Name of the dimension that counts replicas which train separately for some steps (see
`tracing.replicas`)."""


@dataclass(frozen=True)
class Node:
    """One operation of a graph.

    Attributes:
      inputs, outputs: tensor ids.
      scope: path of names given by the model, for reports.
      body: the block of a scan.
      name: of the operation in its scope; an operation of backward has the name of its forward operation.
      call: the library's call that computes it with others (`Scopes.in_call`); backward's has the same name.
    """

    index: int
    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: str
    phase: Phase
    body: Block | None = None
    name: str = ""
    call: str = ""

    @property
    def path(self) -> str:
        """The node's path in rules of a layout (`Layout.at`)."""
        return f"{self.scope}/{self.name}" if self.scope else self.name

    @property
    def made(self) -> tuple[int, ...]:
        """The tensors that it makes, with the stacks that its loop saves for backward."""
        return self.outputs if self.body is None else (*self.outputs, *self.body.saved.values())

    def in_phase(self, phase: Phase) -> Node:
        """The same, with the nodes of its loop, in another phase."""
        nodes = [] if self.body is None else [node.in_phase(phase) for node in self.body.nodes]
        return replace(self, phase=phase, body=self.body and replace(self.body, nodes=nodes))


def _operands(node: Node) -> Sequence[int]:
    return node.op.operands(node.inputs)


def reads(node: Node, operands: Callable[[Node], Iterable[int]] = _operands) -> set[int]:
    """The tensors that a node reads, also from inside its loop's body.

    Args:
      operands: those of a node that count.
    """
    found = set(operands(node))
    body = node.body
    if body is not None:
        found.update(outer for outer, _ in body.sliced)
        found.update((*body.carry_out, *(inner for inner, _ in body.results)))
        found.update(i for i in (body.runs, body.first) if i is not None)
        for inner in body.nodes:
            found |= reads(inner, operands)
    return found


@dataclass(frozen=True)
class Half:
    """One function of a reversible body: its inputs, its outputs, and the nodes between them."""

    argument: int
    result: int
    nodes: tuple[Node, ...]


@dataclass
class Block:
    """The nodes of a graph or of a loop body, and how a body's tensors connect to those outside.

    Attributes:
      dim: the stacked dimension; one iteration per element.
      reverse: runs from the last element to the first.
      forward: for the backward of a loop, the block that it differentiates.
      carry_in, carry_out: body tensor ids of the state passed from iteration to iteration.
      sliced: (outer stacked tensor, body tensor of one iteration).
      stacked: (body tensor, outer tensor that stacks it along `dim`).
      summed: (body tensor, outer tensor that sums it over the iterations).
      saved: body tensor -> outer stacked tensor, for values that the backward loop reads.
      captured: tensor of `forward` -> its value here, in the backward.
      runs: bool scalar, carried, a part or from outside: whether an iteration runs. One that does not run
        passes its carries on, stacks zeros and adds nothing.
      first: int scalar from outside: the element at which iterations begin in stacks that are longer than the
        loop; other elements of their results are zero.
      begin: the number of the element of a loop over a part of its dimension; without `first`, results have
        the loop's length.
      single: a block of one iteration that the model does not see as a loop: values lack its dimension.
      branch: of a choice: the share of the times in which it is taken, as a price counts it.
      spread: its iterations run at once, each on the devices that hold its part of `dim`: the stages of a
        pipeline, or replicas. It carries nothing. An iteration's part of a stack has one element, or several:
        then it keeps a first dimension for them.
      halves: f and g of a reversible body; backward recomputes its inputs from its outputs.
      parts: the same loop in parts, in the order in which they run, where these save or read other values.
    """

    id: int
    parent: int | None = None
    dim: Dim = WHOLE
    reverse: bool = False
    forward: Block | None = None
    index: int | None = None
    runs: int | None = None
    first: int | None = None
    begin: int | None = None
    single: bool = False
    branch: Fraction | None = None
    spread: bool = False
    nodes: list[Node] = field(default_factory=list)
    carry_in: tuple[int, ...] = ()
    carry_out: tuple[int, ...] = ()
    sliced: list[tuple[int, int]] = field(default_factory=list)
    stacked: list[tuple[int, int]] = field(default_factory=list)
    summed: list[tuple[int, int]] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    captured: dict[int, int] = field(default_factory=dict)
    halves: tuple[Half, ...] = ()
    parts: tuple[Block, ...] = ()

    @property
    def results(self) -> list[tuple[int, int]]:
        """(body tensor, outer tensor) of its stacks, then of its sums."""
        return [*self.stacked, *self.summed]

    @property
    def handed(self) -> list[tuple[int, int]]:
        """The same, with what it saves for its backward."""
        return [*self.results, *self.saved.items()]

    def walk(self, times: int = 1) -> Iterator[tuple[Node, int]]:
        """Every node once, including nodes of inner loops, with the number of its runs."""
        for node in self.nodes:
            yield node, times
            if node.body is not None:
                yield from node.body.walk(times * node.body.dim.size)


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
P = ParamSpec("P")


def per_graph(make: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Makes a function of a graph or outline, and of what else it is given, work each answer out once."""

    @wraps(make)
    def known(graph: G, /, *more: P.args, **named: P.kwargs) -> T:
        return graph.remembered((make, *more, *named.items()), lambda: make(graph, *more, **named))

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
