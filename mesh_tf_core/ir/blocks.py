"""The parts of a graph: nodes, blocks of nodes (the graph itself, and the bodies of loops), and the
operations that connect it to the world (fed inputs, variables, loops), lowered by `lower` itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar

from mesh_tf_core.ir.dims import Dim
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


def reads(node: Node) -> set[int]:
    """The tensors that a node reads, also from inside its loop's body."""
    found = set(node.op.operands(node.inputs))
    body = node.body
    if body is not None:
        found.update(outer for outer, _ in body.sliced)
        found.update((*body.carry_out, *(inner for inner, _ in body.results)))
        found.update(i for i in (body.runs, body.first) if i is not None)
        for inner in body.nodes:
            found |= reads(inner)
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
