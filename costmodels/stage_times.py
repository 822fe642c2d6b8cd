"""How long stages of a pipeline work and wait, where each is a program of its own.

One program for all stages runs every slot in every tick. Stages with programs of their own take as long as
the longest way through the schedule's table (`mesh_tf_core.ir.schedules.PipelineSchedule.path`): the fullest
one works without a break, the others before its first microbatch and behind its last one. So of the runs that
one program has in ticks count

  layers  as many as there are slots on the way, each with the layers that its stage has
  ends    what only the first or the last stage does: as many as there are slots of that stage on the way
  none    of what the first stage has kept since its forward slot, which one program makes once more, and
          of what takes results of a stage at an end to all stages (`mesh_tf_core.tracing.pipelined_step`)

The model's FLOPs decide which way is the longest (those of unaligned products count more), for every layout
the same one, so that prices of parts of a program add up. Work behind the ticks (the update) counts as one
program does it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from costmodels.kernels.quantities import quantity_of
from costmodels.stage_ends import StageEnd, end_work, layer_numbers, schedule_of
from mesh_tf_core.ir.blocks import TICK, Node, Outline, per_graph, reads
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import KINDS, PipelineSchedule
from mesh_tf_core.ir.stage_orders import IDLE, StageAction
from mesh_tf_core.ops.neighbours import ShiftAlong
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.microbatch_order import second_half

FORWARD, BACKWARD, FIRST = StageAction.FORWARD, StageAction.BACKWARD, StageEnd.FIRST
UNALIGNED = 4.0
"""Time of a product whose rows begin at odd elements over that of an aligned one: `unaligned_efficiency` of
PyTorch is 0.23 to 0.33."""

Slots = Mapping[int, int]
"""Node -> the kind of slots that runs it (`StageAction`), or `HEAD`."""
HEAD = len(StageAction)
"""The kind of slots of what follows behind the layers, which the last stage runs."""


@dataclass(frozen=True)
class StageTimes:
    """The work of stages that counts.

    Attributes:
      nodes: node in ticks -> the share of its runs that counts; all of others.
      done: the same of what all stages do together, which is less: most wait, or have fewer layers.
      again: node whose results are made once more for backward -> the share if they were not kept.
      runs: node -> how often it runs.
      tensors: what loops add up or stack of such nodes -> the same.
      waits: node of a slot -> the part of what counts in which the fullest stage waits for others; below zero
        for slots of weights, which fill what the others leave idle.
      fullest: number of that stage.
      layers: how many layers of slots of each kind count.
      ends: how often what the first stage alone does, forward and backward, and the last one.
    """

    nodes: Mapping[int, float]
    done: Mapping[int, float]
    again: Mapping[int, float]
    runs: Mapping[int, float]
    tensors: Mapping[int, float]
    waits: Mapping[int, float]
    fullest: int
    layers: tuple[float, ...]
    ends: tuple[float, float, float]

    def waiting(self, node: int, runs: float) -> float:
        """The part of a node's work in which the fullest stage waits; none of what runs behind the ticks."""
        return self.waits[node] if node in self.waits and runs > 0.999 * self.runs[node] else 0.0


@per_graph
def stage_times(graph: Outline) -> StageTimes | None:
    """Those of a step with one pipeline; None of others."""
    column = schedule_of(graph)
    return None if column is None else _Times(graph, column.schedule, column.stage.name).found()


class _Times:
    """Attributes:
    layers: [stage, chunk]; `place`: those that one program has in a slot.
    ticks: slot -> in how many any stage has it.
    runs, nodes: node of stages -> how often it runs in one program, and these nodes.
    """

    def __init__(self, graph: Outline, of: PipelineSchedule, stage: str) -> None:
        self.graph, self.of, self.stage, self.work = graph, of, stage, end_work(graph)
        self.runs = runs_in_ticks(graph)
        self.nodes = [node for block in graph.blocks for node in block.nodes if node.index in self.runs]
        self.ticks = np.array([max(len(of.done(slot)), 1) for slot in StageAction])
        self.layers, self.place = self._layers()
        self.last = int(of.virtual.max())

    def _layers(self) -> tuple[np.ndarray, int]:
        """The layers of every chunk, and places for them."""
        of, numbers = self.of, layer_numbers(self.graph)
        nodes, slots = (node for node, _ in self.graph.walk()), self.work.slots
        slot = next(n.body for n in nodes if slots.get(n.index) == FORWARD and n.body and n.body.spread)
        # Of a virtual stage that recomputes some layers, these and the others are loops of their own.
        place = sum(n.body.dim.size for n in slot.nodes if n.body is not None and not n.body.single)
        layers = of.stages * of.order.rounds * place if numbers is None else numbers.layers
        return of.order.of_stages(layers), place

    def _end(self, node: Node) -> tuple[StageAction, bool] | None:
        """Of work of a stage at an end: the slot that it is done with, and whether it is the last stage's."""
        ends = self.work.nodes.get(node.index)
        if not ends:
            return None
        enters = ends == {FIRST} and node.phase == Phase.FORWARD and node.index not in self.work.remade
        return (FORWARD, False) if enters else (BACKWARD, ends != {FIRST})

    def _costs(self) -> np.ndarray:
        """FLOPs of a slot, [slot, virtual stage]."""
        slots = defaultdict[StageAction, float](float)
        ends = defaultdict[tuple[StageAction, bool], float](float)
        for node in self.nodes:
            once = node.body is None and node.index not in self.work.remade
            flops = self.runs[node.index] * self._work(node) if once else 0.0
            if node.index in self.work.slots:
                slots[self.work.slots[node.index]] += flops
            elif (end := self._end(node)) is not None:
                ends[end] += flops
        each = np.zeros(self.last + 1)
        each[self.of.virtual] = self.layers / self.place
        found = np.array([slots[slot] / self.ticks[slot] * each for slot in StageAction])
        for (slot, last), flops in ends.items():
            found[slot, self.last * last] += flops / self._runs(slot, last)
        return found

    def _work(self, node: Node) -> float:
        """Its FLOPs; of a product of unaligned matrices as many as take as long."""
        inputs, outputs = ([self.graph.tensor(i).type for i in ids] for ids in (node.inputs, node.outputs))
        found = quantity_of(node.op, tuple(inputs), tuple(outputs))
        return node.op.flops(*inputs) * (UNALIGNED if found.unaligned else 1)

    def _runs(self, slot: StageAction, last: bool) -> int:
        """Runs of the work of a stage at an end in one program, in all streams."""
        passing = self.of.passing(FORWARD if last else slot, last) != IDLE
        every = np.count_nonzero(passing) if last or self.of.chunks > 1 else self.ticks[slot]
        return int(every) * self.of.streams

    def found(self) -> StageTimes:
        of, costs = self.of, self._costs()
        path = of.path(costs)
        full = path * self.layers  # [slot, stage, chunk]
        fullest = int(np.argmax(costs[:, of.virtual].sum(axis=(0, 2))))
        share = full.sum(axis=(1, 2)) / self.ticks / self.place
        works = of.works * self.layers[fullest].mean()
        waits = 1 - works / np.maximum(full.sum(axis=(1, 2)), 1)
        at = {
            (slot, last): path[slot][of.virtual == self.last * last].sum()
            for slot in StageAction
            for last in (False, True)
        }
        nodes = {index: float(share[slot]) for index, slot in self.work.slots.items()}
        # Of schedules in two directions loops have a few ticks more, so this is up to 5 % too high there.
        each = of.microbatches / of.stages
        layers = each * self.layers.sum() / of.streams / self.ticks / self.place
        done = {index: float(layers[slot]) for index, slot in self.work.slots.items()}
        if not KINDS[of.kind].one_way:  # A stage's result goes to one side.
            moves = (n for n in self.nodes if isinstance(n.op, ShiftAlong) and n.op.dim == self.stage)
            nodes.update((n.index, nodes[n.index] / 2) for n in moves)
        beside = [node for node in self.nodes if node.index not in self.work.slots]
        for node, end in ((node, self._end(node)) for node in beside):
            if end is not None:
                nodes[node.index] = float(at[end]) / self._runs(*end)
                done[node.index] = each / self._runs(*end)
        for node in beside:
            if node.body is not None and node.body.spread:
                nodes.update((n.index, 0.0) for n in (node, *(n for n, _ in node.body.walk())))
        again = {index: nodes[index] for index in self.work.remade if index in nodes}
        nodes.update(dict.fromkeys(again, 0.0))
        done = {index: done.get(index, 0.0) * (share > 0) for index, share in nodes.items()}
        tensors = dict[int, float]()
        for block in reversed(self.graph.blocks):
            for inner, outer in (*block.summed, *block.stacked):
                maker = self.graph.producer.get(inner)
                counts = tensors.get(inner) if maker is None else nodes.get(maker.index, tensors.get(inner))
                if counts is not None:
                    tensors[inner] = tensors[outer] = counts
        return StageTimes(
            nodes,
            done,
            again,
            self.runs,
            tensors,
            {index: float(waits[slot]) for index, slot in self.work.slots.items()},
            fullest,
            tuple(map(float, full.sum(axis=(1, 2)))),
            (float(at[FORWARD, False]), float(at[BACKWARD, False]), float(at[BACKWARD, True])),
        )


def runs_in_ticks(graph: Outline, layers: bool = True) -> dict[int, float]:
    """Loops over ticks and nodes inside of them -> how often each runs on a device; without `layers`, how
    often its slot does."""
    found = dict[int, float]()
    for block in graph.blocks:
        around = [*graph.around(block)]
        if not any(b.dim.name == TICK for b in around):
            continue
        slot = next((at for at, b in enumerate(around) if b.spread), 0)
        sizes = (b.dim.size * float(b.branch or 1) for b in around[0 if layers else slot :] if not b.spread)
        runs = math.prod(sizes)
        found.update((node.index, runs) for node in block.nodes)
    for node, _ in graph.walk():
        if node.body is not None and node.body.dim.name == TICK:
            found[node.index] = float(node.body.dim.size)
    return found


def slots_of(graph: Graph | Outline, dim: str) -> Slots:
    """Node in loops over layers -> the kind of slots that runs it, or one that runs no more often."""
    found = dict[int, StageAction]()
    for block in (b for b in graph.blocks if b.dim.name == dim):
        late = second_half(block, graph)
        for top in block.nodes:
            back = StageAction.WEIGHTS if top.index in late else StageAction.BACKWARD
            inner = () if top.body is None else (node for node, _ in top.body.walk())
            for node in (top, *inner):
                found[node.index] = StageAction.FORWARD if node.phase == Phase.FORWARD else back
    return found


def head_of(graph: Graph, dim: str) -> Iterator[int]:
    """The nodes of a step that follow behind the layers, forward, and before they go backward."""
    for around in graph.blocks:
        after, back = set[int](), set[int]()
        for node in around.nodes:
            read, loop = reads(node), node.body is not None and node.body.dim.name == dim
            if read & back or (loop and node.phase != Phase.FORWARD):
                back.update(node.outputs)
            elif loop or (read & after and node.phase != Phase.UPDATE):
                after.update(node.outputs)
                inner = () if node.body is None else (each for each, _ in node.body.walk())
                yield from () if loop else (each.index for each in (node, *inner))


def outside(graph: Graph, dim: str) -> tuple[float, float]:
    """FLOPs of a step outside of its layers, before the update: of what follows behind these; of the rest."""
    layers, head, flops = slots_of(graph, dim), {*head_of(graph, dim)}, [0.0, 0.0]
    for node, times in graph.outline().walk():
        if node.inputs and node.body is None and node.index not in layers and node.phase != Phase.UPDATE:
            types = (graph.tensor(i).type for i in node.inputs)
            flops[node.index not in head] += times * node.op.flops(*types)
    return flops[0], flops[1]
