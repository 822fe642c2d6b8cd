"""The pipeline bubble: the seconds of a step's price that stages wait.

The schedule's table (`mesh_tf_core.ir.schedules`) has the number of ticks of a pass in which a stage works,
and in which it is idle. The ticks may belong to one loop, or to several, one after the other (1F1B: some only
forward, some only backward).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from costmodels.pricing.lines import Cost, Line
from costmodels.stage_times import StageTimes
from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.instructions import GRADIENT
from mesh_tf_core.ir.outline import Outline
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import KINDS, StageAction
from mesh_tf_core.ops.neighbours import ShiftAlong
from mesh_tf_core.ops.ticks import LayerNumbers, ScheduleColumn


@dataclass(frozen=True)
class PipelineBubble:
    """One dimension's pipelines.

    Attributes:
      ticks: of a pass; a stage waits in `waits` of them.
      seconds: of the step, in which each stage waits.
      places, empty: for layers, of all stages, and how many have none, as the stages do not divide them (0 of
        0: they do). A stage works on these too.
      fullest: where stages are programs of their own, the number of the one with the most work, from 1; the
        others wait longer than `seconds`, and none works on empty places.
    """

    dim: str
    stages: int
    ticks: int
    waits: int
    seconds: float
    places: int = 0
    empty: int = 0
    fullest: int = 0


def waiting(program: Program, cost: Cost, apart: StageTimes | None = None) -> list[PipelineBubble]:
    """Bubbles of a program's pipelines, one for each dimension of layers.

    Args:
      apart: what counts where stages are programs of their own.
    """
    graph = program.outline
    if graph is None or not any(b.spread for b in graph.blocks):
        return []
    found: dict[str, PipelineBubble] = {}
    schedules = {n.op.stage: n.op.schedule for n, _ in graph.walk() if isinstance(n.op, ScheduleColumn)}
    ops = (n.op for n, _ in graph.walk() if isinstance(n.op, LayerNumbers))
    lacking = {op.stage: (op.order.size(op.layers), op.order.size(op.layers) - op.layers) for op in ops}
    beside = {dim for dim, of in schedules.items() if KINDS[of.kind].at_once}
    for dim, slots in _slots(graph, beside).items():
        if dim not in schedules:  # Replicas are no stages.
            continue
        ticks, waits = schedules[dim].ticks, schedules[dim].ticks - schedules[dim].works
        if apart is not None:
            waited = (x.exposed * x.times * apart.waiting(x.origin.node, x.runs) for x in cost.lines)
            seconds = sum(waited)
            found[dim.name] = PipelineBubble(
                dim.name, dim.size, ticks, waits, seconds, fullest=apart.fullest + 1
            )
            continue
        seconds = sum(x.exposed * x.times for x in cost.lines if _stays(x, slots))
        places, empty = lacking.get(dim, (0, 0))
        found[dim.name] = PipelineBubble(
            dim.name, dim.size, ticks, waits, seconds * waits / ticks, places, empty
        )
    return list(found.values())


def _slots(graph: Outline, beside: Set[Dim]) -> dict[Dim, dict[int, float]]:
    """Stages -> the nodes of their slots, but for slots of weights, in which none is idle; each with the
    number of runs of its slot.

    Args:
      beside: stages whose loops over ticks have work of all devices, too.
    """
    found: dict[Dim, dict[int, float]] = {}
    weights = {
        n.outputs[0]
        for n in graph.nodes
        if isinstance(n.op, ScheduleColumn) and n.op.slot is StageAction.WEIGHTS
    }
    for block in graph.blocks:
        of_weights = {inner for outer, inner in block.sliced if outer in weights}
        for node in block.nodes:
            body = node.body
            if body is None or not body.spread or body.dim is None or not any(n.body for n in body.nodes):
                continue  # Without layers it only says what has left a stage.
            if any(outer in of_weights for outer, _ in body.sliced):
                continue
            own = [n for n in block.nodes if n is node or isinstance(n.op, ShiftAlong)]
            inside = {n.index for n, _ in body.walk()} | {n.index for n in own}
            if body.dim not in beside:
                inside |= {n.index for n, _ in block.walk()}
                inside |= {n.index for n in graph.nodes if n.body is block}
            found.setdefault(body.dim, {}).update(dict.fromkeys(inside, _runs(graph, block)))
    return found


def _runs(graph: Outline, block: Block) -> float:
    """How often a block in loops runs."""
    times = 1.0
    while block.dim is not None:
        times *= block.dim.size * float(block.branch or 1)
        block = graph.blocks[block.parent or 0]
    return times


def _stays(line: Line, slots: Mapping[int, float]) -> bool:
    """Whether a line is what stages do in ticks; what waits behind the loop runs once."""
    runs = slots.get(line.origin.node)
    return runs is not None and line.runs >= runs and not (line.runs == 1 and line.purpose == GRADIENT)
