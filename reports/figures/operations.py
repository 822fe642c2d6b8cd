"""The most expensive operations, with the communication that each causes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import percent, seconds_text, shorten
from reports.figures.bars import Bar, Bars, BarSegment
from reports.figures.chart import SEARCH, Chart
from reports.figures.time import key_of
from reports.views.work import work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 12


def _draw_operations(plan: PlanFile, title: str = "") -> Figure:
    """One bar per operation and phase: computation and the communication that the step waits for."""
    rows = work(plan)[:MOST]
    high = max((w.seconds for w in rows), default=1.0) or 1.0
    bars = [
        Bar(
            name=one.name,
            value=seconds_text(one.seconds),
            parts=(BarSegment(one.compute, "compute"), BarSegment(one.exposed, "exposed")),
            note=shorten(one.phase, 10),
        )
        for one in rows
    ]
    return Bars(bars, high, key=key_of(bars)).draw(title).figure


def _find_operations(plan: PlanFile) -> str:
    """The concentration of the time on few operations."""
    rows = work(plan)
    total = sum(w.seconds for w in rows)
    if not total:
        return "No operation takes time"
    few = min(3, len(rows))
    share = sum(w.seconds for w in rows[:few]) / total
    first = shorten(rows[0].name, 48)
    return (
        f"the {few} slowest of {len(rows):,} operations take {percent(share)} of the step; the slowest is "
        f"{first}"
    )


def _tell_operations(plan: PlanFile) -> str:
    """Every bar in words."""
    told = [
        f"{w.name} {w.phase}: {seconds_text(w.compute)} compute, "
        f"{seconds_text(w.exposed)} exposed communication"
        for w in work(plan)[:MOST]
    ]
    return f"Slowest operations. {'; '.join(told)}."


operations = Chart(
    "operations",
    "Slowest operations",
    _draw_operations,
    _find_operations,
    _tell_operations,
    lambda plan: "" if plan.details.lines else SEARCH,
)
