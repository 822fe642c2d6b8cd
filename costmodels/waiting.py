"""How long the stages of pipelines wait, of a step's price.

A stage of P works in M of a loop's M + P - 1 ticks (`mesh_tf_core.ops.ticks`): stage s waits in the s first
ticks and the P - 1 - s last ones, forward and backward, so that all wait equally long.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.pricing.lines import Cost
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ops.ticks import Schedule
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Waiting:
    """One dimension's pipelines.

    Attributes:
      ticks: of a pass; a stage waits in `waits` of them.
      seconds: of the step, in which each stage waits.
    """

    dim: str
    stages: int
    ticks: int
    waits: int
    seconds: float


def waiting(program: Program, cost: Cost) -> list[Waiting]:
    """What the stages of a program's pipelines wait, one for each dimension of layers."""
    graph = program.graph
    if not isinstance(graph, Graph) or not any(b.spread for b in graph.blocks):
        return []
    found: dict[str, Waiting] = {}
    for block in graph.blocks:
        around = graph.blocks[block.parent] if block.spread and block.parent else None
        if around is None or around.dim is None or block.dim is None:
            continue
        own = {n.index for n, _ in around.walk()} | {n.index for n in graph.nodes if n.body is around}
        ticks, stages = around.dim.size, block.dim.size
        # What waits behind the loop runs once.
        inside = (x for x in cost.lines if x.origin.node in own and x.times >= ticks)
        schedule = Schedule(ticks - stages + 1, stages)
        seconds = sum(x.exposed * x.times for x in inside) * schedule.bubble
        before = found.get(block.dim.name)
        known = before.seconds if before else 0.0
        found[block.dim.name] = Waiting(block.dim.name, stages, ticks, stages - 1, known + seconds)
    return list(found.values())
