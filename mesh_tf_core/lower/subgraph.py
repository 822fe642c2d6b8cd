"""Choose what lowering covers: a whole graph, or a part alone with everything around it given; and the
pending sums that cross the border of such a part."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.builder import ProgramRewriter
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Program
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower.recomputed import RecomputedStep, in_parts, recomputed
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.tracing.graph import Graph

Access = tuple[int, Phase, int, int]
"""Where a variable is read in the layout's splits: a block, the pass, one of its tensors, its reader."""


@dataclass(frozen=True)
class Twin:
    """A tensor of a second run that backward has, too, as `twin`; `readers` read it there."""

    tensor: int
    twin: int
    readers: tuple[Node, ...] = field(hash=False)


@dataclass(frozen=True, slots=True)
class WantedValue:
    """A tensor that lowering moves, at the end of a block, to where readers outside the part need it.

    Attributes:
      phase, reader: the phase of these readers, and the first of them.
      gradient_of: the variable whose update reads it, in the splits of that update; "": default sharding.
    """

    tensor: int
    phase: Phase
    gradient_of: str = ""
    reader: int = -1


@dataclass(frozen=True, slots=True)
class GraphPart:
    """A small graph to lower: a whole graph, or some of its nodes with everything around them given.

    Attributes:
      step: with the whole graph.
      root: the nodes; loops and their bodies keep the numbers that they have in the graph.
      again: see `Subgraph`.
      alone: some of the graph is missing: values of other nodes are given; whatever is made may be read.
      wanted: id of a block -> its tensors that nodes outside the part read: `Subgraph.natural`, gradients.
      beside: node -> the tensors of `Subgraph.beside` that it is the first node of its block to read.
    """

    step: RecomputedStep
    root: Block
    again: str = ""
    alone: bool = False
    wanted: Mapping[int, Sequence[WantedValue]] = field(default_factory=dict)
    beside: Mapping[int, Sequence[Twin]] = field(default_factory=dict)


@dataclass(frozen=True)
class Subgraph:
    """Lowers only these nodes (by index); values of other nodes are given, in default sharding.

    Attributes:
      nodes: the nodes to lower.
      blocks: ids of the loop bodies that hold some of it.
      natural: also bring a tensor into its natural sharding at the end of a block, as the reader would.
      again: the part is a second run in the backward of loops with this name (`loop_name`), or
        belongs to one (`rematerialization.beside`).
      early: tensors that nodes outside the part also read before the update: a sum of them is neither delayed
        further nor combined with other messages.
      beside: for a second run, tensors that backward also reads and may already have moved; the second run
        reuses them.
      unread: stacks that nothing reads in the whole graph: no loop makes them.
    """

    nodes: frozenset[int]
    blocks: frozenset[int]
    natural: frozenset[Access] = frozenset()
    again: str = ""
    early: frozenset[int] = frozenset()
    beside: tuple[Twin, ...] = ()
    unread: frozenset[int] = frozenset()
    _parts: dict[RecomputedStep, GraphPart] = field(default_factory=dict, compare=False, repr=False)

    def without(self, nodes: Set[int]) -> Subgraph:
        """The same without some nodes."""
        return replace(self, nodes=self.nodes - nodes, _parts={})

    def returned(self, graph: Graph) -> dict[str, Tensor]:
        """`early`, as results of a program."""
        return {f"%{t}": graph.tensor(t) for t in sorted(self.early)}

    def part(self, graph: Graph, recompute: Policies) -> GraphPart:
        """The small graph of these nodes under some policies; it is built once."""
        step = recomputed(graph, recompute, self.unread)
        if step not in self._parts:
            self._parts[step] = _SubgraphBuilder(self, step).part()
        return self._parts[step]


class _SubgraphBuilder:
    """Builds the small graph of a subgraph.

    Attributes:
      known: tensors that the nodes so far read or made, in the order in which lowering goes through them.
    """

    def __init__(self, subgraph: Subgraph, step: RecomputedStep) -> None:
        self.subgraph, self.step, self.graph = subgraph, step, step.graph
        self.known: set[int] = set()
        self.beside: dict[int, list[Twin]] = {}
        self.wanted: dict[int, list[WantedValue]] = {}
        for block, phase, tensor, reader in sorted(subgraph.natural):
            self.wanted.setdefault(block, []).append(WantedValue(tensor, phase, reader=reader))
        outside = self.wanted.setdefault(0, [])
        for tensor, variable in self.graph.gradient_of.items():
            if not self.graph.tensor(tensor).block:
                outside.append(WantedValue(tensor, Phase.UPDATE, variable))

    def part(self) -> GraphPart:
        whole, what = self.graph.blocks[0], self.subgraph
        root = replace(whole, nodes=self._nodes(whole))
        return GraphPart(self.step, root, what.again, True, self.wanted, self.beside)

    def _nodes(self, block: Block) -> list[Node]:
        """The nodes of a block to lower, and the loops to enter."""
        twins, found = {each.tensor: each for each in self.subgraph.beside}, list[Node]()
        for node in block.nodes:
            here = node.index in self.subgraph.nodes
            if here or (node.body is not None and node.body.id in self.subgraph.blocks):
                self.known.update(node.inputs if here else ())
                if node.body is not None:
                    node = self._loop(node, node.body, here)
                elif self.subgraph.again:
                    node = replace(node, phase=Phase.RECOMPUTE)
                found.append(node)
                self.known.update(node.outputs if here else ())
                if first := twins.keys() & node.inputs:
                    self.beside[node.index] = [twins.pop(t) for t in first]
        return found

    def _loop(self, scan: Node, block: Block, here: bool) -> Node:
        """A loop reduced to the part; it keeps its own state if the loop itself is in the part (`here`)."""
        run, unread, step = self.subgraph.again, self.subgraph.unread, self.step
        read = {i for node in block.nodes if node.index in self.subgraph.nodes for i in node.inputs}
        read.update(want.tensor for want in self.wanted.get(block.id, ()))
        # The part of a known stack has its splits, which others see where nobody here reads it.
        sliced = [(outer, inner) for outer, inner in block.sliced if inner in read or outer in self.known]
        self.known.update(inner for _, inner in sliced)
        nodes = self._nodes(block)

        def made(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
            here = ((i, o) for i, o in pairs if o not in unread)
            own, known, graph = self.subgraph.nodes, self.known, self.graph
            return [(i, o) for i, o in here if (i in known if i < 0 else _source(i, scan, graph) in own)]

        stacked, summed = (made(step.read_again(p, block, run)) for p in (block.stacked, block.summed))
        parts = [(b, n, dict(made(each.saves(block, run)))) for b, n, each in step.parts(block, run)]
        # A second run is a part of its own.
        body = replace(block, forward=None, nodes=nodes, sliced=sliced, stacked=stacked, summed=summed)
        self.known.update(o for _, o in (*stacked, *summed))
        self.known.update(o for *_, saved in parts for o in saved.values())
        if not here:
            body = replace(body, carry_in=(), carry_out=(), runs=None)
        body = in_parts(body, [(b, n, replace(body, saved=saved)) for b, n, saved in parts])
        phase = Phase.RECOMPUTE if run else scan.phase
        if here:
            return replace(scan, body=body, phase=phase)
        outputs = tuple(o for _, o in (*stacked, *summed))
        return replace(scan, inputs=(), outputs=outputs, body=body, phase=phase)


def made_by(node: Node, graph: Graph) -> tuple[int, ...]:
    """The tensors that a node computes itself; of a loop final carries, and stacks of values that it only
    passes on: its body's nodes compute its other results."""
    block = node.body
    if block is None:
        return node.outputs
    passed = (o for i, o in block.results if _source(i, node, graph) == node.index)
    return (*node.outputs[: len(block.carry_in)], *passed)


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
    made = {o: i for i, o in loop.body.handed}
    return _source(made[tensor], loop, graph) if tensor in made else loop.index


@dataclass(frozen=True)
class Cut:
    """Tensors whose sum is taken after operations outside the part, each with the axes of the sum.

    Attributes:
      given: operands: their sum has to wait further here.
      left: results: their sum, over just these axes, is taken elsewhere.
    """

    given: Mapping[int, Axes] = field(default_factory=dict)
    left: Mapping[int, Axes] = field(default_factory=dict)

    @cached_property
    def key(self) -> Hashable:
        """Equal for equal cuts, and hashable."""
        return frozenset(self.given.items()), frozenset(self.left.items())

    def begin(self, program: Program) -> Program:
        """The program with the sums of its given values at the start."""
        if not self.given:
            return program
        made = {o for instr in program.code for o in instr.outputs}
        taken = [v for v in program.values if v.tensor in self.given and v.id not in made]
        state = ProgramRewriter(program)
        for v in taken:
            axes = self.given[v.tensor]
            if {a for split in v.splits for a in split} & {*axes}:
                raise LayoutError(
                    f"{v}: a sum over {'+'.join(axes)} cannot be deferred, because the tensor is split over "
                    "the same axis"
                )
            state.emit(AllReduce((state.otherwise(v.id, partial=axes),), (v.id,), state.origin, axes))
        return state.rewritten((*state.code, *program.code))

    def end(self, program: Program) -> Program:
        """The program without the sums that it leaves to others; LayoutError if one that it was given did not
        wait, or one that it is to leave is another."""
        made = {o for instr in program.code for o in instr.outputs}
        left, renamed, code = dict(self.left), dict[int, int](), []
        for instr in program.code:
            if isinstance(instr, AllReduce):
                (put, *_), (out, *_) = instr.inputs, instr.outputs
                tensor = program.values[out].tensor
                if put not in made and tensor in self.given:
                    raise LayoutError(f"the sum of tensor %{tensor} cannot be deferred")
                if tensor in left and instr.axes == left[tensor]:
                    del left[tensor]
                    renamed[out] = put
                    continue
            code.append(instr)
        if left:
            raise LayoutError(
                f"tensors {sorted(left)} have no sum over the requested axes that could be deferred"
            )
        results = {name: renamed.get(i, i) for name, i in program.results.items()}
        return replace(program, code=tuple(code), results=results) if renamed else program


NO_CUT = Cut()
