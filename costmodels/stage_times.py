"""How long stages of a pipeline work and wait, where each is a program of its own.

One program for all stages runs every slot in every tick. Stages with programs of their own take as long as
the longest way through the schedule's table (`mesh_tf_core.ir.schedules.PipelineSchedule.path`): the fullest
one works without a break, the others before its first microbatch and behind its last one. So of the runs that
one program has in ticks count

  layers  as many as there are slots on the way, each with the layers that its stage has
  ends    what only the first or the last stage does: as many as there are slots of that stage on the way
  none    of what takes results of a stage at an end to all stages (`mesh_tf_core.tracing.tick_loops`)

The model's FLOPs decide which way is the longest, for every layout the same one, so that prices of parts of a
program add up. Work behind the ticks (the update) counts as one program does it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from costmodels.stage_ends import StageEnd, end_work
from mesh_tf_core.ir.blocks import TICK, Block, Node
from mesh_tf_core.ir.outline import Outline, per_graph
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import PipelineSchedule, StageAction
from mesh_tf_core.ir.stored_order import PADDING
from mesh_tf_core.ops.ticks import LayerNumbers, ScheduleColumn

FORWARD, BACKWARD, FIRST = StageAction.FORWARD, StageAction.BACKWARD, StageEnd.FIRST


@dataclass(frozen=True)
class StageTimes:
    """The work of stages that counts.

    Attributes:
      nodes: node in ticks -> the share of its runs that counts; all of others.
      runs: node -> how often it runs.
      tensors: what loops add up or stack of such nodes -> the same.
      waits: node of a slot -> the part of what counts in which the fullest stage waits for others; below zero
        for slots of weights, which fill what the others leave idle.
      fullest: number of that stage.
    """

    nodes: Mapping[int, float]
    runs: Mapping[int, float]
    tensors: Mapping[int, float]
    waits: Mapping[int, float]
    fullest: int

    def waiting(self, node: int, runs: float) -> float:
        """The part of a node's work in which the fullest stage waits; none of what runs behind the ticks."""
        return self.waits[node] if node in self.waits and runs > 0.999 * self.runs[node] else 0.0


@per_graph
def stage_times(graph: Outline) -> StageTimes | None:
    """Those of a step whose microbatches go backward at once; None of others."""
    slots = end_work(graph).slots
    of = next((n.op.schedule for n in graph.nodes if isinstance(n.op, ScheduleColumn)), None)
    return None if of is None or not slots else _Times(graph, of).found()


class _Times:
    """Attributes:
    layers: [stage, chunk]; `place`: those that one program has in a slot.
    ticks: slot -> in how many any stage has it.
    ends: runs of the first stage's own work, and of the last one's, in one program.
    """

    def __init__(self, graph: Outline, of: PipelineSchedule) -> None:
        self.graph, self.of, self.work = graph, of, end_work(graph)
        self.ticks = np.maximum(of.busy.sum(axis=0), 1)
        self.layers, self.place = self._layers()
        self.last = int(of.virtual.max())

    def _layers(self) -> tuple[np.ndarray, int]:
        """The layers of every chunk, and places for them."""
        of, nodes = self.of, (n for n, _ in self.graph.walk())
        numbers = next(
            (n.op.order.numbers(n.op.layers) for n in nodes if isinstance(n.op, LayerNumbers)), None
        )
        bodies = (n.body for n, _ in self.graph.walk() if n.index in self.work.slots)
        place = next(
            b.dim.size
            for b in bodies
            if b is not None and b.dim is not None and not b.spread and not b.single
        )
        if numbers is None:
            return np.full((of.stages, of.chunks), place), place
        return (numbers != PADDING).reshape(of.stages, of.chunks, -1).sum(axis=2), place

    def _end(self, node: Node) -> tuple[StageAction, bool] | None:
        """Of work of a stage at an end: the slot that it is done with, and whether it is the last stage's."""
        ends = self.work.nodes.get(node.index)
        if not ends:
            return None
        enters = ends == {FIRST} and node.phase == Phase.FORWARD
        return (FORWARD, False) if enters else (BACKWARD, ends != {FIRST})

    def _costs(self) -> np.ndarray:
        """FLOPs of a slot, [slot, virtual stage]."""
        slots = defaultdict[StageAction, float](float)
        ends = defaultdict[tuple[StageAction, bool], float](float)
        for node, runs in _in_ticks(self.graph):
            types = [self.graph.tensor(i).type for i in node.inputs]
            flops = 0.0 if node.body is not None else runs * node.op.flops(*types)
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

    def _runs(self, slot: StageAction, last: bool) -> int:
        """Runs of the work of a stage at an end in one program."""
        return self.of.microbatches if last or self.of.chunks > 1 else int(self.ticks[slot])

    def found(self) -> StageTimes:
        of, costs = self.of, self._costs()
        path = of.path(costs)
        full = path * self.layers  # [slot, stage, chunk]
        fullest = int(np.argmax(costs[:, of.virtual].sum(axis=(0, 2))))
        share = full.sum(axis=(1, 2)) / self.ticks / self.place
        works = of.microbatches * self.layers[fullest].sum()
        waits = 1 - works / np.maximum(full.sum(axis=(1, 2)), 1)
        at = {
            (slot, last): path[slot][of.virtual == self.last * last].sum()
            for slot in StageAction
            for last in (False, True)
        }
        nodes = {index: float(share[slot]) for index, slot in self.work.slots.items()}
        for node, _ in _in_ticks(self.graph):
            if node.index not in nodes and (end := self._end(node)) is not None:
                nodes[node.index] = min(1.0, float(at[end]) / self._runs(*end))
        for node, _ in _in_ticks(self.graph):
            if node.index not in self.work.slots and node.body is not None and node.body.spread:
                nodes.update((n.index, 0.0) for n in (node, *(n for n, _ in node.body.walk())))
        tensors = dict[int, float]()
        for block in reversed(self.graph.blocks):
            for inner, outer in (*block.summed, *block.stacked):
                maker = self.graph.producer.get(inner)
                counts = tensors.get(inner) if maker is None else nodes.get(maker.index, tensors.get(inner))
                if counts is not None:
                    tensors[inner] = tensors[outer] = counts
        return StageTimes(
            nodes,
            {node.index: runs for node, runs in _in_ticks(self.graph)},
            tensors,
            {index: float(waits[slot]) for index, slot in self.work.slots.items()},
            fullest,
        )


def _in_ticks(graph: Outline) -> Iterator[tuple[Node, float]]:
    """The nodes in loops over ticks, each with how often it runs on a device."""
    for block in graph.blocks:
        around, runs = [*_around(graph, block)], 1.0
        if any(b.dim is not None and b.dim.name == TICK for b in around):
            for b in around:
                runs *= b.dim.size * float(b.branch or 1) if b.dim is not None and not b.spread else 1
            yield from ((node, runs) for node in block.nodes)


def _around(graph: Outline, block: Block) -> Iterator[Block]:
    """A block and those around it."""
    yield block
    while block.parent is not None:
        block = graph.blocks[block.parent]
        yield block
