"""Pipelines: a loop over equal layers as stages on different devices, which work on different microbatches at
the same time (Huang et al. 2019, "GPipe"; as one SPMD program: Xu et al. 2021, "GSPMD", section 3.3).

In a tick a device runs a slot of each kind that the tick has, of one virtual stage each, as in the table of
the schedule (`ir.schedules`); an idle stage computes on numbers that are not used. A step in M microbatches
is a loop over ticks (`microbatch`: sums over them, and which sums have to be whole before). It is split into
loops where a kind of slots or the losses begin, so that a gradient is added up in one loop, in one place in
memory: with P stages of R virtual stages, and a pass of T ticks, in 1F1B

  P R - 1 ticks  before the layers of a microbatch, forward
  T ticks        the same, in the first T - (P R - 1); behind the layers, the loss and its gradient of a
                 microbatch; backward

and in GPipe a pass of T ticks forward, the same split, and one of T ticks backward; gradients of losses wait
for it (`PipelineSchedule.turning`). With one virtual stage per stage, microbatches enter and leave at every
tick; with several, at P of P R ticks, and operations before and after the layers run only at these
(`Block.runs`).

Stages keep the values of a virtual stage that backward reads, each in a ring of `PipelineSchedule.in_flight`
places. Or they keep each layer's state and its kept values, and backward recomputes the rest of the layer. Or
they keep only the state at the beginning of the virtual stage, and backward recomputes everything from there
(`layer_parts.LayerAgain`). Operations before the layers are recomputed wherever an operation behind
the layers reads them. The gradients of an idle slot are zero, and it adds nothing.

Variables that layers read by parts are stored so that each device has its virtual stages
(`ir.stored_order`); other readers, and other stacks, are converted from one order to the other.
"""

from collections.abc import Mapping

from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.layer_parts import LayerAgain
from mesh_tf_core.tracing.tick_loops import TickLoops
from mesh_tf_core.tracing.virtual_stages import VirtualStageCopy


def pipelined_step(
    graph: Graph,
    batch: str,
    parts: int,
    dim: str,
    stages: int,
    schedule: str,
    wanted: Mapping[str, Tensor],
    again: LayerAgain | None = None,
) -> tuple[Graph, dict[str, Tensor]]:
    """A step, or its forward operations, as a pipeline over the loop that `dim` counts; otherwise as
    `microbatch.accumulate`, where forward operations alone may give values of single examples, as
    [microbatch, its rows].

    Args:
      again: the part of layers that backward recomputes; None: none, stages keep all values that it reads.

    Raises:
      UserError: the loop cannot be a pipeline; with the reason and the remedy.
    """
    copy = VirtualStageCopy(
        graph, batch, parts, dim, stages, schedule, lambda copy, order: TickLoops(copy, order, again).build()
    )
    return copy.run(wanted)
