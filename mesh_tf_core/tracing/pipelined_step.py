"""The schedule 1F1B of a pipeline (Narayanan et al. 2019, "PipeDream", section 3.2; with one update a step:
Narayanan et al. 2021, "Megatron-LM", section 2.2.1): backward of a microbatch starts as soon as it has passed
all stages, so the number of microbatches in flight grows with the stages and not with the microbatches. Where
a stage has several virtual stages, it is interleaved (there: section 2.2.2).

One SPMD program: in a tick a device runs a forward slot and a backward slot, of one virtual stage each, as in
the table of the schedule (`ir.schedules`). A step in M microbatches is a loop over these (`microbatch`: sums
over them, and which sums have to be whole before). It is split into loops where a kind of slots begins, so
that a gradient is added up in one loop, in one place in memory: with P stages of R virtual stages, and a pass
of T ticks,

  P R - 1 ticks  before the layers of a microbatch, forward
  T ticks        the same, in the first T - (P R - 1); behind the layers, the loss and its gradient of a
                 microbatch; backward

so that there are T slots of each kind. With one virtual stage per stage, microbatches enter and leave at
every tick; with several, at P of P R ticks, and operations before and after the layers run only at these
(`Block.runs`).

Stages keep the values of a virtual stage that backward reads, each in a ring of `PipelineSchedule.in_flight`
places. Or they keep each layer's state and its kept values, and backward recomputes the rest of the layer. Or
they keep only the state at the beginning of the virtual stage, and backward recomputes everything from there
(`virtual_stages.RecomputeLayer`). Operations before the layers are recomputed wherever an operation behind
the layers reads them. The gradients of an idle slot are zero, and it adds nothing.

Variables that layers read by parts lie as in circular schedules (`tracing.pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.microbatch_order import MicrobatchOrder
from mesh_tf_core.tracing.tick_loops import TickLoops
from mesh_tf_core.tracing.virtual_stages import RecomputeLayer, VirtualStageCopy


def pipelined_step(
    graph: Graph,
    batch: str,
    parts: int,
    dim: str,
    stages: int,
    schedule: str,
    wanted: Mapping[str, Tensor],
    again: RecomputeLayer | None = None,
) -> tuple[Graph, dict[str, Tensor]]:
    """A step as a pipeline over the loop that `dim` counts, for schedules that go backward at once; otherwise
    as `microbatch.accumulate`.

    Args:
      again: parts that backward recomputes; None: none, stages keep all values that backward reads.

    Raises:
      UserError: the loop cannot be a pipeline; with the reason and the remedy.
    """

    def loops(
        copy: VirtualStageCopy, needed: Sequence[Node], over: tuple[Node, Node], sums: Iterable[int]
    ) -> dict[int, Tensor]:
        order = MicrobatchOrder(copy, needed, *over, sums, copy.trained, copy.refusal)
        return TickLoops(copy, order, again).build()

    return VirtualStageCopy(graph, batch, parts, dim, stages, schedule, loops).run(wanted)
