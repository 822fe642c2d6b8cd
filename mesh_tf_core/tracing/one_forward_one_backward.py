"""The schedule 1F1B of a pipeline (Narayanan et al. 2019, "PipeDream", section 3.2; with one update a step:
Narayanan et al. 2021, "Megatron-LM", section 2.2.1): backward of a microbatch begins as soon as it has gone
through all stages, so that what is in flight grows with the stages and not with the microbatches. Where a
stage has several chunks of layers, it is interleaved (there: section 2.2.2; `ops.ticks` has the order).

One SPMD program: a device does a forward slot and a backward slot in a turn, of one chunk each. Of a step in
M microbatches (`microbatch`: sums over them, and which sums have to be whole before) the loop over the parts
is taken apart: with P stages of R chunks, and a pass of T ticks (`Schedule.ticks`), into

  P R - 1 turns        before the layers of a microbatch, forward
  T - (P R - 1) turns  the same; behind the layers, the loss and its gradient of a microbatch; backward
  P R - 1 turns        backward

so that there are T slots of each kind. In turn t stage s is forward at its own tick t - s, and backward, last
chunk first, at t - (P R - 1) - (P - 1 - s): with one chunk, with microbatches t - s and t - (2 P - 2 - s).
With one chunk microbatches enter and leave in every turn; with several in P of P R, and what is before and
behind the layers runs in these alone (`Block.runs`).

What backward reads of a chunk's layers stays, each value in a ring of `Schedule.in_flight` places; or of each
layer its state and what it is to keep, and backward runs the rest of the layer again; or the state at the
beginning of the chunk alone, and backward runs the chunk again from there (`chunks.Again`). What comes before
the layers is made again wherever something behind reads it. A slot that waits has gradients of zero, and adds
nothing.

Variables that layers read by parts lie as in circular schedules (`tracing.pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.chunks import Again, ChunkCopy
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.standing import Kind
from mesh_tf_core.tracing.turns import Turns


def one_forward_one_backward(
    graph: Graph,
    batch: str,
    parts: int,
    dim: str,
    stages: int,
    schedule: str,
    wanted: Mapping[str, Tensor],
    again: Again | None = None,
) -> tuple[Graph, dict[str, Tensor]]:
    """A step as a pipeline over the loop that `dim` counts, in a schedule; otherwise as
    `microbatch.accumulate`.

    Args:
      again: what runs again for backward; None: nothing, stages keep all that it reads.

    Raises:
      UserError: the loop cannot be one; why, and what to do.
    """
    made = _OneForwardOneBackward(graph, batch, parts, dim, stages, schedule)
    made.runs_again = again
    return made.run(wanted)


class _OneForwardOneBackward(ChunkCopy):
    """The step under construction."""

    runs_again: Again | None = None

    def _loop(self, sums: Iterable[int]) -> None:
        sums = list(sums)
        needed = self._needed(sums)
        loops = [n for n in needed if n.body is not None and n.body.dim is not None]
        over = [n for n in loops if n.body.dim.name == self.layers]  # type: ignore[union-attr]
        if not over:
            super()._loop(sums)
            return
        forward = [n for n in over if n.phase == "forward"]
        backward = [n for n in over if n.phase != "forward"]
        if not backward:
            raise self.refusal("the loss needs sums over the whole batch of what the layers make")
        if len(forward) != 1 or len(backward) != 1 or backward[0].body.forward is not forward[0].body:  # type: ignore[union-attr]
            raise self.refusal("more than one loop runs over these layers")
        self.add_up(Turns(self, needed, forward[0], backward[0], sums, self.runs_again).build())

    def _is_added(self, tensor: int) -> bool:
        """Not what adds other sums that have to be whole: a microbatch goes through the stages once."""
        maker = self.makers.get(tensor)
        if maker is not None and maker.phase == "forward" and maker.body is None:
            kinds = {self.standings.of(i).kind for i in maker.inputs}
            if self.standings.of(tensor).after and kinds <= {Kind.SAME, Kind.SUM}:
                return False
        return super()._is_added(tensor)
