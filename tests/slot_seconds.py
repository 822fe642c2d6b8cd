"""Seconds of a schedule's slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mesh_tf_core.ir.schedules import PipelineSchedule


def together(of: PipelineSchedule, costs: Sequence[float]) -> float:
    """Of one program that all stages run: each kind of slot in every tick in which any stage has it."""
    return float((of.busy @ np.asarray(costs, float)).sum())


def apart(of: PipelineSchedule, costs: Sequence[float]) -> float:
    """Of one program for each stage: each slot as soon as its inputs arrive."""
    every = np.repeat(np.asarray(costs, float)[:, None], of.virtual.max() + 1, axis=1)
    return float((of.path(every) * every[:, of.virtual]).sum())
