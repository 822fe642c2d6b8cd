"""Several plans on one scale: their step times, and their memory against the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import against, bytes_text, letter, mesh_text, seconds_text
from reports.figures.bars import Bar, Bars, BarSegment
from reports.figures.sheet import settings
from reports.figures.time import UNFIT, key_of, time_parts
from reports.plan import one_model
from reports.reader import PlanLike, plan_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plans_time(plans: Sequence[PlanLike], title: str = "Step time of each plan") -> Figure:
    """One bar per plan: compute, the compute that hides communication, exposed communication."""
    found = [plan_of(p) for p in plans]
    with settings():
        rows = [_time(found[0], p, i) for i, p in enumerate(found)]
        return Bars(rows, max(r.total for r in rows) or 1.0, key=key_of(rows)).draw(title).figure


def _name(plan: PlanFile, position: int) -> str:
    hardware = f", {plan.hardware}" if plan.hardware else ""
    return f"{letter(position)}  {mesh_text(plan.mesh)}{hardware}"


def _time(first: PlanFile, plan: PlanFile, position: int) -> Bar:
    p, said = plan.predicted, seconds_text(plan.predicted.step_seconds)
    if position and one_model((first, plan)):
        said += f" · {against(p.step_seconds, first.predicted.step_seconds)}"
    return Bar(
        name=_name(plan, position),
        value=said,
        parts=time_parts(p),
        note=UNFIT if plan.fits is False else "",
        note_token="bad",
        faint=plan.fits is False,
    )


def plans_memory(plans: Sequence[PlanLike], title: str = "Peak memory of each plan") -> Figure:
    """One bar per plan, each against the memory of its own devices."""
    found = [plan_of(p) for p in plans]
    limits = {p.memory_limit for p in found}
    limit = found[0].memory_limit if len(limits) == 1 else None
    with settings():
        high = max(x for p in found for x in (p.predicted.peak_memory_bytes, p.memory_limit or 0.0)) or 1.0
        rows = [_memory(p, i, limit is None) for i, p in enumerate(found)]
        shown = (limit, f"limit {bytes_text(limit)}") if limit else None
        return Bars(rows, high * 1.02, shown).draw(title).figure


def _memory(plan: PlanFile, position: int, own: bool) -> Bar:
    """`own`: its limit is not that of all."""
    peak, limit = plan.predicted.peak_memory_bytes, plan.memory_limit
    over = plan.fits is False and limit is not None
    return Bar(
        name=_name(plan, position),
        value=f"{bytes_text(peak)} of {bytes_text(limit)}" if limit and own else bytes_text(peak),
        parts=(BarSegment(peak, "bad" if over else "memory", bytes_text(peak)),),
        limit=limit if own else None,
        note=f"{bytes_text(peak - limit)} over the limit" if over and limit is not None else "",
        note_token="bad",
        faint=over,
    )
