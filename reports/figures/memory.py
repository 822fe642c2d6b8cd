"""The memory of a device: by layout against the limit, and instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from layoutopt.plan.details import MemoryTimeline
from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import bytes_text, percent, rounded, seconds_text, shorten, some, times_text
from reports.figures.bars import Bar, Bars, BarSegment, cut_scale
from reports.figures.chart import SEARCH, byte_steps, chart, round_steps
from reports.figures.sheet import MARGIN, SMALL, WIDTH, FigureSheet, dots, label, text_width, ticks
from reports.tables import rows as tables
from reports.theme import LIGHT
from reports.views.choices import Ranked, ranked
from reports.views.layouts import layouts
from reports.views.timeline import holdings_at_peak, phases, placed, thinned, total_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LAYOUTS = 10
MOST_HOLDINGS = 5
TOLD = 100
"""Number of points of the timeline that show their values under the pointer."""
PLOT = 190.0


def _memory_bar(row: Ranked, limit: float | None) -> Bar:
    predicted = row.choice.predicted
    name = "This plan" if row.is_answer else row.names
    if predicted is None:
        return Bar(name, "", note="no prediction", faint=True)
    peak = predicted.peak_memory_bytes
    over = limit is not None and peak > limit
    return Bar(
        name=name,
        value=bytes_text(peak),
        parts=(BarSegment(peak, "bad" if over else "memory", bytes_text(peak)),),
        note=f"{bytes_text(peak - limit)} over the limit" if over and limit else "",
        note_token="bad" if over else "muted",
        bold=row.is_answer,
        faint=over and not row.is_answer,
    )


def _find_memory_by_layout(plan: PlanFile) -> str:
    limit, peak = plan.memory_limit, plan.predicted.peak_memory_bytes
    if limit is None:
        return (
            f"The plan needs a peak of {bytes_text(peak)} per device; the plan does not record how much "
            "memory a device has"
        )
    state = "leaves" if peak <= limit else "lacks"
    text = f"The plan {state} {bytes_text(abs(limit - peak))} of {bytes_text(limit)} on every device"
    over = [
        r.choice.name
        for r in ranked(plan)
        if r.choice.predicted and r.choice.predicted.peak_memory_bytes > limit and not r.is_answer
    ]
    verb = "does" if len(over) == 1 else "do"
    return f"{text}; {some(over, 3, 30)} {verb} not fit" if over else text


def _timeline(sheet: FigureSheet, found: MemoryTimeline, limit: float | None) -> None:
    ax = sheet.axes(52, 30, WIDTH - 60, PLOT)
    peak = found.points[found.peak].bytes
    shows_limit = limit is not None and limit <= 1.9 * peak
    high = max(peak, limit if limit and shows_limit else 0.0) * 1.14 or 1.0
    steps, place = [s for s in byte_steps(high, 4) if s <= high], placed(found)
    ax.set_ylim(0, high)
    ax.set_xlim(0, 1)
    ticks(ax, "y", steps, [rounded(bytes_text(s)) if s else "0" for s in steps])
    whole = total_seconds(found)
    at_times = round_steps(whole, 4) if whole else []
    ticks(ax, "x", [t / whole for t in at_times], [rounded(seconds_text(t)) for t in at_times], grid=False)
    x, y = zip(*((place(i + 0.5), held) for i, held in thinned(found)), strict=True)
    x, at = (0.0, *x[1:-1], 1.0) if len(x) > 1 else x, place(found.peak + 0.5)
    few = thinned(found, TOLD)
    marks = dots(ax, [(place(i + 0.5), held) for i, held in few], "memory", 6, alpha=0)
    sheet.tip(marks, *(_said(found, i, place(i + 0.5) * whole) for i, _ in few), near=True)
    ax.fill_between(x, 0, y, step="mid", color=LIGHT["memory"], linewidth=0, clip_on=False)
    if found.variables:
        ax.fill_between(
            [x[0], x[-1]], 0, found.variables, color=LIGHT["variables"], linewidth=0, clip_on=False
        )
    words = f"limit {bytes_text(limit or 0.0)}"
    if limit and shows_limit:
        ax.plot(ax.get_xlim(), [limit, limit], color=LIGHT["bad"], linewidth=1.75, clip_on=False)
        label(ax, 0, limit, words, "bad", (2, 4))
    elif limit:
        words += f", {times_text(limit / peak)} the peak" if peak else ""
        label(ax, 1, high, words, "bad", (0, 2), "right")
    _phases(ax, found, high, place, 30 if whole else 16)
    ax.plot([at] * 2, [0, peak], color=LIGHT["memory"], linewidth=1.25, zorder=0.9)
    dots(ax, [(at, peak)], "ink", 6)
    offset, align = ((-9, 3), "right") if at > 0.55 else ((9, 3), "left")
    label(ax, at, peak, f"peak {bytes_text(peak)}", "ink", offset, align, bold=True)
    keys = [("memory", "activations, gradients, buffers")]
    if found.variables:
        keys.insert(0, ("variables", f"variables {bytes_text(found.variables)}"))
    sheet.key(13, keys)


def _said(found: MemoryTimeline, position: int, second: float) -> str:
    """What is held while one instruction runs."""
    p = found.points[position]
    where = "/".join(filter(None, (p.scope, p.name)))
    when = f" after {seconds_text(second)}" if second else ""
    return (
        f"{bytes_text(p.bytes)}{when}: {shorten(where, 60)}{f' ({shorten(p.phase, 20)})' if p.phase else ''}"
    )


def _phases(
    ax: Axes, found: MemoryTimeline, high: float, place: Callable[[float], float], below: float
) -> None:
    """Names of the phases in the middle of their stretch of the axis, and lines between them."""
    for phase in phases(found):
        start, end = place(phase.start), place(phase.end)
        if phase.start:
            ax.plot([start] * 2, [-high * 0.12, high], color=LIGHT["rule"], linewidth=1.0, clip_on=False)
        room = int((end - start) * (WIDTH - 60) / (0.61 * SMALL))
        if room >= min(len(phase.name), 4):
            label(ax, (start + end) / 2, 0, shorten(phase.name, room), "muted", (0, -below), "center")


def _holdings(sheet: FigureSheet, found: MemoryTimeline, y: float) -> None:
    """The largest tensors at the peak as bars of their share of it."""
    where = found.points[found.peak]
    place = f"{where.scope}/{where.name}" if where.scope else where.name
    sheet.text(MARGIN, y, f"Tensors at the peak, during {shorten(place, 30)}", bold=True, size=SMALL)
    peak = where.bytes or 1.0
    for position, holding in enumerate(holdings_at_peak(found)[:MOST_HOLDINGS]):
        top = y + 8 + 31 * position
        value = f"{bytes_text(holding.bytes)} · {percent(holding.bytes / peak)}"
        room = WIDTH - text_width(value, SMALL) - 12
        sheet.text(MARGIN, top + 12, shorten(holding.name, int(room / (0.61 * SMALL))), size=SMALL)
        sheet.text(WIDTH - MARGIN, top + 12, value, "muted", SMALL, "right")
        token = "variables" if holding.what.startswith("variable ") else "memory"
        sheet.rect(MARGIN, top + 17, (WIDTH - 2 * MARGIN) * min(holding.bytes / peak, 1.0), 6, token)


def _find_memory_timeline(plan: PlanFile) -> str:
    """The peak, and its largest tensors."""
    found = plan.details.memory
    if found is None or not found.points:
        return "Memory during the step"
    point = found.points[found.peak]
    phase = f" of the {shorten(point.phase, 20)} phase" if point.phase else ""
    text = (
        f"The memory peak of {bytes_text(point.bytes)} occurs during "
        f"{shorten(point.name or point.scope, 40)}{phase}"
    )
    if found.variables and point.bytes:
        text += f"; variables take {percent(found.variables / point.bytes)} of the peak"
    return text


@chart("Memory by layout", _find_memory_by_layout, layouts)
def memory_by_layout(plan: PlanFile, title: str = "") -> Figure:
    """One bar per layout, its peak memory on a device, against the limit."""
    rows = ranked(plan)[:MOST_LAYOUTS]
    limit = plan.memory_limit
    peaks = [r.choice.predicted.peak_memory_bytes for r in rows if r.choice.predicted]
    high = cut_scale(peaks, plan.predicted.peak_memory_bytes)
    if limit and limit < 8 * high:
        high = min(max(high, limit * 1.02), max(limit * 1.6, plan.predicted.peak_memory_bytes))
    beyond = ", beyond the scale" if limit and limit > high else ""
    shown = (limit, f"limit {bytes_text(limit)}{beyond}") if limit else None
    return Bars([_memory_bar(r, limit) for r in rows], high or 1.0, shown).draw(title).figure


@chart(
    "Memory during the step",
    _find_memory_timeline,
    tables.memory_phases,
    lambda plan: "" if plan.details.memory and plan.details.memory.points else SEARCH,
)
def memory_timeline(plan: PlanFile, title: str = "") -> Figure:
    """Bytes held while the program runs, the variables at the bottom, and the tensors at the peak."""
    found = plan.details.memory or MemoryTimeline()
    holdings = holdings_at_peak(found)[:MOST_HOLDINGS]
    room = 80 if total_seconds(found) else 66
    sheet = FigureSheet(PLOT + room + (26 + 31 * len(holdings) if holdings else 0), title)
    _timeline(sheet, found, plan.memory_limit)
    if holdings:
        _holdings(sheet, found, PLOT + room + 16)
    return sheet.figure
