"""The pipeline bubble: the seconds of a step's price that stages wait.

The schedule's table (`mesh_tf_core.ir.schedules`) has the number of ticks of a pass in which a stage works,
and in which it is idle. The ticks may belong to one loop, or to several, one after the other (1F1B: some only
forward, some only backward).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodels.pricing.hidden import Cost
from costmodels.stage_ends import end_work, layer_numbers, schedule_of
from costmodels.stage_times import StageTimes, runs_in_ticks
from mesh_tf_core.ir.instructions import GRADIENT
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.schedules import PipelineSchedule


@dataclass(frozen=True)
class PipelineBubble:
    """The pipeline of a step.

    Attributes:
      dim: the dimension of layers.
      lost: number of a line of the step's cost -> seconds of it in which each stage waits.
      places, empty: for layers, of all stages, and how many have none, as the stages do not divide them (0 of
        0: they do). A stage works on these too.
      fullest: where stages are programs of their own, the number of the one with the most work, from 1; the
        others wait longer than `seconds`, and none works on empty places.
    """

    dim: str
    schedule: PipelineSchedule
    lost: Mapping[int, float] = field(repr=False)
    places: int = 0
    empty: int = 0
    fullest: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the step in which each stage waits."""
        return sum(self.lost.values())


def waiting(program: Program, cost: Cost, apart: StageTimes | None = None) -> PipelineBubble | None:
    """The bubble of a program with a pipeline.

    Args:
      apart: what counts where stages are programs of their own.
    """
    graph = program.outline
    column = schedule_of(graph)
    if column is None:
        return None
    dim, of = column.stage.name, column.schedule
    if apart is not None:
        parts = (apart.waiting(x.origin.node, x.runs) for x in cost.lines)
        waited = {
            n: x.exposed * x.times * part for n, (x, part) in enumerate(zip(cost.lines, parts, strict=True))
        }
        return PipelineBubble(dim, of, waited, fullest=apart.fullest + 1)
    # What waits behind the ticks is never idle.
    runs, slots = runs_in_ticks(graph, layers=False), end_work(graph).slots
    idle = {node: of.idle(slot) for node, slot in slots.items()}
    lost = {
        n: x.exposed * x.times * idle[x.origin.node]
        for n, x in enumerate(cost.lines)
        if x.origin.node in idle and runs[x.origin.node] <= x.runs and (x.runs > 1 or x.purpose != GRADIENT)
    }
    numbers = layer_numbers(graph)
    places = (numbers.order.size(numbers.layers), numbers.order.lacks(numbers.layers)) if numbers else (0, 0)
    return PipelineBubble(dim, of, lost, *places)
