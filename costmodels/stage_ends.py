"""The work that only the first or the last stage of a pipeline does, where each is a program of its own: the
layers before the stages (embedding), and those behind them (output layer, loss), with their weights.

One program for all stages has their work beside the stages' in its loops over ticks
(`mesh_tf_core.tracing.pipelined_step`). What depends on what leaves the stages forward is the last stage's;
what depends on what leaves them backward, and what enters them, is the first one's. A sum is theirs whose
terms it adds up, an update theirs whose gradient it reads, and a variable theirs who update it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from mesh_tf_core.ir.blocks import ARRIVING, IN_FLIGHT, TICK, Assign, Block, Node, Outline, per_graph, reads
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Instr, Loop, Program
from mesh_tf_core.ir.schedules import KINDS
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.ops.neighbours import ShiftAlong
from mesh_tf_core.ops.stages import LayerNumbers, Passing, ScheduleColumn


class StageEnd(Enum):
    """The first stage, the last one, or the fullest one between them, which has no work of its own; and the
    one of these that most gradients of weights wait at, when they do."""

    FIRST = "first"
    LAST = "last"
    MIDDLE = "fullest middle"
    DRAINED = "drained middle"


Ends = frozenset[StageEnd]
EVERY: Ends = frozenset()
"""The ends of work that all stages do."""


@dataclass
class EndWork:
    """The work of single stages.

    Attributes:
      nodes: node -> the stages that do it; others are all stages'.
      slots: node -> the kind of slot that it is part of.
      variables: as `nodes`, of their variables.
      both: the first stage is also the last one; `elsewhere`: nodes of the streams of microbatches of which
        it is not, which the stage at the other end has.
      remade: loops over layers of the first stage that make forward values once more in a backward slot, and
        what is inside. A stage with a program of its own has kept them.
      losses: of how many microbatches the last stage holds the loss until backward.
    """

    nodes: dict[int, Ends] = field(default_factory=dict)
    slots: dict[int, StageAction] = field(default_factory=dict)
    variables: dict[str, Ends] = field(default_factory=dict)
    both: bool = False
    elsewhere: set[int] = field(default_factory=set)
    remade: set[int] = field(default_factory=set)
    losses: int = 1

    def has(self, node: int, end: StageEnd) -> bool:
        """True if a stage does the work of a node."""
        ends = self.nodes.get(node, EVERY)
        return (
            not ends
            or (end in ends and node not in self.elsewhere)
            or (self.both and end is StageEnd.FIRST and node not in self.elsewhere)
        )

    def of_others(self, end: StageEnd) -> frozenset[str]:
        """The variables that a stage lacks."""
        lacks = (name for name, ends in self.variables.items() if ends and end not in ends)
        return frozenset(() if self.both and end is StageEnd.FIRST else lacks)

    def absent(self, program: Program, end: StageEnd) -> set[int]:
        """The values of a program that a stage lacks."""
        found = set[int]()

        def visit(code: Iterable[Instr]) -> None:
            for instr in code:
                if isinstance(instr, Loop):
                    visit(instr.body)
                    found.update(r.outer for r in instr.results if r.inner in found)
                if not self.has(instr.origin.node, end):
                    found.update(instr.outputs)

        visit(program.code)
        return found


@per_graph
def end_work(graph: Outline) -> EndWork:
    """The work of single stages in a step with a pipeline; none in others."""
    columns = {n.outputs[0]: n.op for n in graph.nodes if isinstance(n.op, ScheduleColumn)}
    return _Ends(graph, columns).found if columns else EndWork()


@per_graph
def schedule_of(graph: Outline) -> ScheduleColumn | None:
    """A column of the schedule of a step with a pipeline."""
    return next((n.op for n in graph.nodes if isinstance(n.op, ScheduleColumn)), None)


class _Ends:
    """Finds the work of single stages.

    Attributes:
      own: tensor -> the stages that make it; `after`: results of slots -> the stage that they go to.
      open: nodes whose stages depend on who reads them.
      entering: what the stages read.
    """

    def __init__(self, graph: Outline, columns: Mapping[int, ScheduleColumn]) -> None:
        of = next(iter(columns.values())).schedule
        both = KINDS[of.kind].turns or KINDS[of.kind].mirrored
        self.graph, self.found = graph, EndWork(both=both, losses=max(1, of.turning))
        self.own: dict[int, Ends] = {}
        self.after: dict[int, Ends] = {}
        self.open: list[Node] = []
        self.entering = set[int]()
        for node in graph.nodes:
            body = node.body
            if body is not None and body.dim.name == TICK:
                self._visit(body, {tensor: op.slot for tensor, op in columns.items()})
            else:
                # A scalar, as the norm of all gradients, goes to all.
                read = (i for i in reads(node) if graph.tensor(i).shape.dims)
                self._takes(node, EVERY.union(*(self.own.get(i, EVERY) for i in read)))
        self._read()
        self.found.elsewhere.update(self._elsewhere() if KINDS[of.kind].mirrored else ())
        for node in graph.nodes:
            if isinstance(node.op, Assign):
                self.found.variables[node.op.variable.name] = self.found.nodes.get(node.index, EVERY)

    def _visit(self, block: Block, columns: Mapping[int, StageAction]) -> None:
        columns = {**columns, **{inner: columns[outer] for outer, inner in block.sliced if outer in columns}}
        for node in block.nodes:
            slot = _slot(node, columns)
            if slot is not None:
                self.entering |= reads(node)
                assert node.body is not None
                self.found.slots.update((n.index, slot) for n in (node, *(n for n, _ in node.body.walk())))
                if slot is not StageAction.WEIGHTS:
                    end = StageEnd.LAST if slot is StageAction.FORWARD else StageEnd.FIRST
                    self.after.update((o, frozenset({end})) for o in node.outputs)
            elif node.body is not None and node.body.single:
                self._visit(node.body, columns)
            elif isinstance(node.op, ShiftAlong):
                self.found.slots[node.index] = StageAction(node.phase != Phase.FORWARD)
            else:
                found = (known.get(i, EVERY) for i in reads(node) for known in (self.own, self.after))
                self._takes(node, EVERY.union(*found))
        results = (*block.summed, *block.stacked)
        self.own.update((outer, self.own[inner]) for inner, outer in results if inner in self.own)

    def _elsewhere(self) -> Iterator[int]:
        """The nodes that run in ticks of a stream which begins, or ends, at another than the first stage."""
        passing = {n.outputs[0]: n.op for n in self.graph.nodes if isinstance(n.op, Passing)}
        numbers = {o for o, op in passing.items() if op.schedule.end(op.end, op.stream)[0]}
        for block in self.graph.blocks:
            numbers.update(inner for outer, inner in block.sliced if outer in numbers)
            for node in block.nodes:
                if node.body is None:
                    made = (o for o in node.outputs if self.graph.tensor(o).type.dtype == "bool")
                    numbers.update(made if not numbers.isdisjoint(node.inputs) else ())
                elif node.body.runs in numbers:
                    yield from (n.index for n in (node, *(n for n, _ in node.body.walk())))

    def _takes(self, node: Node, ends: Ends) -> None:
        """A node, and what it makes, is the work of some stages, if these are known."""
        if not ends:
            self.open.append(node)
            return
        inner = (n for n, _ in node.body.walk()) if node.body is not None else ()
        self.found.nodes.update((n.index, ends) for n in (node, *inner))
        self.own.update((o, ends) for o in node.outputs)

    def _read(self) -> None:
        """What enters the stages is made by the first one; what only single stages read, by these."""
        inside = {n.index for block in self.graph.blocks[1:] for n in block.nodes}
        phases = {n.index: n.phase for block in self.graph.blocks for n in block.nodes}
        leaves = {i: o for block in self.graph.blocks if block.single for i, o in block.summed}
        readers: dict[int, set[int]] = {}
        for node in (n for block in self.graph.blocks for n in block.nodes):
            inner = set[int]().union(*map(reads, node.body.nodes)) if node.body is not None else set()
            for i in reads(node) - inner:
                readers.setdefault(i, set()).add(node.index)
        for node in reversed(self.open):
            # What a branch makes goes out of it.
            made = {*node.outputs, *(leaves[o] for o in node.outputs if o in leaves)}
            made |= {*node.body.saved.values()} if node.body is not None else set()
            read = set[int]().union(*(readers.get(o, ()) for o in made))
            if node.index in inside and not self.entering.isdisjoint(made):
                self._takes(node, frozenset({StageEnd.FIRST}))
            elif read and read <= self.found.nodes.keys():
                self._takes(node, EVERY.union(*(self.found.nodes[r] for r in read)))
                late = {r for r in read if phases[r] != Phase.FORWARD} | self.found.remade
                if node.body is not None and node.phase == Phase.FORWARD and read <= late:
                    self.found.remade |= {node.index, *(n.index for n, _ in node.body.walk())}


def _slot(node: Node, columns: Mapping[int, StageAction]) -> StageAction | None:
    """The slot in which stages run layers, if a node is one."""
    body = node.body
    if body is None or not body.spread or not any(n.body is not None for n in body.nodes):
        return None
    return next((columns[outer] for outer, _ in body.sliced if outer in columns), None)


@per_graph
def layer_numbers(graph: Outline) -> LayerNumbers | None:
    """The layers of stages, if some stage lacks one."""
    return next((n.op for n in graph.nodes if isinstance(n.op, LayerNumbers)), None)


@per_graph
def stage_shares(graph: Outline) -> Mapping[StageEnd, Mapping[tuple[str, int], float]]:
    """Stages that are programs of their own -> the shares of microbatches in flight and of layers that they
    have. One between the ends is there if it has more layers than the first, or more waits there."""
    if (column := schedule_of(graph)) is None:
        return {}
    of, numbers = column.schedule, layer_numbers(graph)
    layers = np.ones(of.stages)
    if numbers is not None:
        layers = of.order.of_stages(numbers.layers).sum(axis=1) / numbers.place.size
    flying, waiting = np.array([of.held_apart(stage) for stage in range(of.stages)]).T
    ring = of.ring(StageAction.BACKWARD) if KINDS[of.kind].split else 0

    def shares(stage: int, late: bool = False) -> dict[tuple[str, int], float]:
        held = of.held_apart(stage, late)
        found = {(IN_FLIGHT, ring): held[1] / max(ring, 1)}
        found[IN_FLIGHT, of.in_flight] = max(
            held[0] / of.in_flight, found.get((IN_FLIGHT, of.in_flight), 0.0)
        )
        for slot in list(StageAction)[:2]:
            places, here = of.waiting(slot), of.arrivals[slot][:, stage].max() + 1
            found[ARRIVING, places] = max(found.get((ARRIVING, places), 0.0), here / max(places, 1))
        if numbers is not None:
            own, place = numbers.place.name, numbers.place.size
            sizes = {(own, place), (own, place // of.chunks), (numbers.stage.name, place * of.stages)}
            found |= dict.fromkeys(sizes - {(numbers.stage.name, of.stages)}, layers[stage])
        return found

    both = end_work(graph).both
    others = range(1, of.stages if KINDS[of.kind].turns else of.stages - 1)
    found = {StageEnd.FIRST: shares(0)} | ({} if both else {StageEnd.LAST: shares(of.stages - 1)})
    if others:
        middle = max(others, key=lambda s: (flying[s] * layers[s], waiting[s] * layers[s], layers[s]))
        kept = [flying * layers, waiting * layers, layers]
        found |= {StageEnd.MIDDLE: shares(middle)} if any(each[middle] > each[0] for each in kept) else {}
        late = max(others, key=lambda s: of.held_apart(s, True)[1] * layers[s])
        if of.held_apart(late, True)[1] > waiting[middle]:
            found[StageEnd.DRAINED] = shares(late, True)
    return found
