"""Figures of a plan: `reports.figures.step_time(plan)` is a matplotlib Figure."""

from __future__ import annotations

from reports.figures.chart import Chart
from reports.figures.evidence import calibration, predicted_measured
from reports.figures.memory import memory_by_layout, memory_timeline
from reports.figures.mesh import mesh
from reports.figures.pieces import matrix, pieces
from reports.figures.plans import plans_memory, plans_time
from reports.figures.time import operations, step_time, time_by_kind
from reports.figures.tradeoffs import frontier, sensitivity
from reports.reader import PlanLike

ALL: tuple[Chart, ...] = (
    mesh,
    matrix,
    pieces,
    step_time,
    time_by_kind,
    memory_by_layout,
    memory_timeline,
    frontier,
    sensitivity,
    operations,
    predicted_measured,
    calibration,
)
"""Every figure, in the order of the report."""
