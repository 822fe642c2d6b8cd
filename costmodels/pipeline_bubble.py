"""The pipeline bubble: the seconds of a step's price that stages wait.

The schedule's table (`mesh_tf_core.ir.schedules`) has the number of ticks of a pass in which a stage works,
and in which it is idle. The ticks may belong to one loop, or to several, one after the other (1F1B: some only
forward, some only backward).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from costmodels.pricing.lines import Cost, Line
from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.instructions import GRADIENT
from mesh_tf_core.ir.outline import Outline
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import StageAction
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
    """

    dim: str
    stages: int
    ticks: int
    waits: int
    seconds: float
    places: int = 0
    empty: int = 0


def waiting(program: Program, cost: Cost) -> list[PipelineBubble]:
    """Bubbles of a program's pipelines, one for each dimension of layers."""
    graph = program.outline
    if graph is None or not any(b.spread for b in graph.blocks):
        return []
    found: dict[str, PipelineBubble] = {}
    schedules = {n.op.stage: n.op.schedule for n, _ in graph.walk() if isinstance(n.op, ScheduleColumn)}
    ops = (n.op for n, _ in graph.walk() if isinstance(n.op, LayerNumbers))
    lacking = {op.stage: (op.order.size(op.layers), op.order.size(op.layers) - op.layers) for op in ops}
    for dim, loops in _ticking(graph).items():
        both = any(len(phases) > 1 for phases in loops.values())
        passes = [graph.blocks[i].dim.size for i, phases in loops.items() if Phase.FORWARD in phases]  # type: ignore[union-attr]
        ticks, seconds = sum(passes) if both else max(passes), 0.0
        for i in loops:
            own = _slots(graph, graph.blocks[i], both)
            times = graph.blocks[i].dim.size  # type: ignore[union-attr]
            seconds += sum(x.exposed * x.times for x in cost.lines if _stays(x, own, times))
        waits = ticks - schedules[dim].works
        places, empty = lacking.get(dim, (0, 0))
        found[dim.name] = PipelineBubble(
            dim.name, dim.size, ticks, waits, seconds * waits / ticks, places, empty
        )
    return list(found.values())


def _ticking(graph: Outline) -> dict[Dim, dict[int, set[str]]]:
    """Stages -> the loops over ticks that they work in, and in which phases there."""
    found: dict[Dim, dict[int, set[str]]] = {}
    for node, _ in graph.walk():
        body = node.body
        if body is not None and body.spread and body.parent and body.dim is not None and _is_slot(body):
            found.setdefault(body.dim, {}).setdefault(body.parent, set()).add(node.phase)
    return found


def _is_slot(body: Block) -> bool:
    """Whether stages run layers there, and do not only say what has left one of them."""
    return any(node.body is not None for node in body.nodes)


def _is_of_weights(body: Block, loop: Block, graph: Outline) -> bool:
    """Whether a slot of a loop over ticks is one of weights, by the columns of the schedule that it reads."""
    columns = {n.outputs[0]: n.op for n in graph.nodes if isinstance(n.op, ScheduleColumn)}
    of_tick = {inner: columns[outer] for outer, inner in loop.sliced if outer in columns}
    return any(of_tick[outer].slot is StageAction.WEIGHTS for outer, _ in body.sliced if outer in of_tick)


def _slots(graph: Outline, loop: Block, both: bool) -> set[int]:
    """The nodes of a loop over ticks that are the stages', but for slots of weights, in which none is idle;
    `both`: beside work of all devices together."""
    if not both:
        return {n.index for n, _ in loop.walk()} | {n.index for n in graph.nodes if n.body is loop}
    spread = [n for n in loop.nodes if n.body is not None and n.body.spread and _is_slot(n.body)]
    stages = [n for n in spread if n.body is not None and not _is_of_weights(n.body, loop, graph)]
    inside = {n.index for each in stages if each.body is not None for n, _ in each.body.walk()}
    return inside | {
        n.index for n in loop.nodes if any(n is s for s in stages) or isinstance(n.op, ShiftAlong)
    }


def _stays(line: Line, nodes: Container[int], ticks: int) -> bool:
    """Whether a line is what stages do in ticks; what waits behind the loop runs once."""
    return (
        line.origin.node in nodes
        and line.times >= ticks
        and not (line.times == 1 and line.purpose == GRADIENT)
    )
