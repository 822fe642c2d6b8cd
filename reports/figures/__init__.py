"""Figures of a plan: `reports.figures.step_time(plan)` is a matplotlib Figure."""

from __future__ import annotations

from layoutopt.plan.schema import PlanFile
from reports.figures.chart import Chart
from reports.figures.evidence import (
    draw_calibration,
    draw_predicted_measured,
    find_calibration,
    find_predicted_measured,
    tell_calibration,
    tell_predicted_measured,
)
from reports.figures.memory import (
    draw_memory_by_layout,
    draw_memory_timeline,
    find_memory_by_layout,
    find_memory_timeline,
    tell_memory_by_layout,
    tell_memory_timeline,
)
from reports.figures.mesh import draw_mesh, find_mesh, tell_mesh
from reports.figures.operations import draw_operations, find_operations, tell_operations
from reports.figures.pieces import (
    draw_matrix,
    draw_pieces,
    find_matrix,
    find_pieces,
    tell_matrix,
    tell_pieces,
)
from reports.figures.plans import plans_memory, plans_time
from reports.figures.time import (
    draw_step_time,
    draw_time_by_kind,
    find_step_time,
    find_time_by_kind,
    tell_step_time,
    tell_time_by_kind,
)
from reports.figures.tradeoffs import (
    draw_frontier,
    draw_sensitivity,
    find_frontier,
    find_sensitivity,
    tell_frontier,
    tell_sensitivity,
)
from reports.reader import PlanLike
from reports.views.choices import frontier as _frontier
from reports.views.work import shares as _shares

COMPARE = (
    "to compare searches with other hardware, memory or numbers of devices, run `layoutopt report A.json "
    "B.json`"
)
VALIDATE = (
    "to measure step times, run `layoutopt validate MODEL --out V.json`; to show them, run `layoutopt "
    "report PLAN.json --validation V.json`"
)
SEARCH = "to include this section, run `layoutopt search MODEL --report FILE.html`"


def _no_frontier(plan: PlanFile) -> str:
    if len(_frontier(plan)) > 1:
        return ""
    if plan.frontier:
        return "there is no trade-off: the fastest layout also needs the least memory"
    return "to include this section, run `layoutopt search MODEL --objective pareto --out PLAN.json`"


def _always(plan: PlanFile) -> str:
    return ""


mesh = Chart("mesh", "The mesh", draw_mesh, find_mesh, tell_mesh, _always)
matrix = Chart(
    "matrix",
    "Dimensions and axes",
    draw_matrix,
    find_matrix,
    tell_matrix,
    lambda p: "" if p.layout or p.details.dims else SEARCH,
)
pieces = Chart(
    "pieces",
    "Shards of the variables",
    draw_pieces,
    find_pieces,
    tell_pieces,
    lambda p: "" if p.details.variables else SEARCH,
)
step_time = Chart("step_time", "Step time by layout", draw_step_time, find_step_time, tell_step_time, _always)
time_by_kind = Chart(
    "time_by_kind",
    "Time by kind of work",
    draw_time_by_kind,
    find_time_by_kind,
    tell_time_by_kind,
    lambda p: "" if any(s.kinds for s in _shares(p).values()) else SEARCH,
)
memory_by_layout = Chart(
    "memory_by_layout",
    "Memory by layout",
    draw_memory_by_layout,
    find_memory_by_layout,
    tell_memory_by_layout,
    _always,
)
memory_timeline = Chart(
    "memory_timeline",
    "Memory during the step",
    draw_memory_timeline,
    find_memory_timeline,
    tell_memory_timeline,
    lambda p: "" if p.details.memory and p.details.memory.points else SEARCH,
)
frontier = Chart(
    "frontier",
    "Time against memory",
    draw_frontier,
    find_frontier,
    tell_frontier,
    _no_frontier,
)
sensitivity = Chart(
    "sensitivity",
    "Sensitivity",
    draw_sensitivity,
    find_sensitivity,
    tell_sensitivity,
    lambda p: "" if any(s.trials for s in p.details.sensitivity) else COMPARE,
)
operations = Chart(
    "operations",
    "Slowest operations",
    draw_operations,
    find_operations,
    tell_operations,
    lambda p: "" if p.details.lines else SEARCH,
)
predicted_measured = Chart(
    "predicted_measured",
    "Predicted against measured",
    draw_predicted_measured,
    find_predicted_measured,
    tell_predicted_measured,
    lambda p: "" if p.details.validation and p.details.validation.timed else VALIDATE,
)
calibration = Chart(
    "calibration",
    "Calibration",
    draw_calibration,
    find_calibration,
    tell_calibration,
    lambda p: (
        ""
        if p.details.calibration and p.details.calibration.samples
        else (
            "to include this section, run `layoutopt calibrate --out PROFILE.json`, then search with "
            "`--hardware PROFILE.json`"
        )
    ),
)

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

__all__ = [
    "ALL",
    "Chart",
    "PlanLike",
    "calibration",
    "frontier",
    "matrix",
    "memory_by_layout",
    "memory_timeline",
    "mesh",
    "operations",
    "pieces",
    "plans_memory",
    "plans_time",
    "predicted_measured",
    "sensitivity",
    "step_time",
    "time_by_kind",
]
