"""The slots of stages over time, drawn from a schedule's table."""

import itertools

import numpy as np

from mesh_tf_core.ir.schedules import KINDS, PipelineSchedule, filled
from mesh_tf_core.ir.stage_orders import IDLE, StageAction, ticks_of, timed


def drawn(of: PipelineSchedule, apart: bool) -> np.ndarray:
    """[stage, time]: F, B and W for the slots of a stage, in lower case those of its later chunks; a dot
    where it is idle. Backward takes two columns where weights have no slots.

    Args:
      apart: each stage has its own program; else all wait for each other in each slot of a tick.
    """
    widths = np.array([1, 2 - KINDS[of.kind].split, 1])
    if apart:
        costs = np.repeat(widths[:, None], of.virtual.max() + 1, axis=1)
        blocks = timed(_own(of), of.virtual, costs, KINDS[of.kind].order is not None)
        every = [(int(b.end), b.works) for b in blocks]
    else:
        ends = (of.busy * widths).cumsum().reshape(of.busy.shape)
        there = np.argwhere(of.table[..., 0] != IDLE).tolist()
        every = [(int(ends[t, slot]), [(slot, s, of.table[t, s, slot, 1])]) for t, s, slot in there]
    found = np.full((of.stages, max(end for end, _ in every)), ".")
    for end, works in every:
        for slot, stage, chunk in reversed(works):
            found[stage, end - widths[slot] : end] = "FBW"[slot] if chunk == 0 else "fbw"[slot]
            end -= widths[slot]
    return found


def _own(of: PipelineSchedule) -> np.ndarray:
    """The table of stages with programs of their own: where backward begins at once, they go forward as often
    as they have microbatches in flight, then backward and forward in turn."""
    if not KINDS[of.kind].at_once or KINDS[of.kind].split:
        return of.table
    orders = []
    for stage in range(of.stages):
        forward, backward = (
            [[(slot, *each)] for each in of.table[:, stage, slot].tolist() if each[0] != IDLE]
            for slot in (StageAction.FORWARD, StageAction.BACKWARD)
        )
        begin = of.in_flight_apart(stage)
        turns = itertools.zip_longest(backward, forward[begin:])
        orders.append([*forward[:begin], *(work for turn in turns for work in turn if work)])
    return filled(of, [*ticks_of(orders, of.virtual)])
