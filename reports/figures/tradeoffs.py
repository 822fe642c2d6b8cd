"""The alternatives: time against memory, and the best time as one factor changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from layoutopt.plan.details import FactorCurve, Trial
from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import (
    bytes_text,
    plural,
    rounded,
    seconds_text,
    shorten,
    signed_percent,
    times_text,
)
from reports.figures.chart import byte_steps, chart, log_steps, padded, round_steps
from reports.figures.sheet import MARGIN, SMALL, WIDTH, FigureSheet, dots, label, ticks
from reports.tables import rows as tables
from reports.theme import LIGHT
from reports.views import choices, layouts
from reports.views.choices import OnFrontier
from reports.views.curves import FACTORS, factor_value, layout_letters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMPARE = (
    "to compare searches with other hardware, memory or numbers of devices, run `layoutopt report A.json "
    "B.json`"
)
PLOT = 210.0
PANEL = 152.0


def _range(ax: Axes, right: float, top: float) -> None:
    x, y = byte_steps(right, 4), round_steps(top, 4)
    ax.set_xlim(0, right)
    ax.set_ylim(0, top)
    ticks(ax, "x", x, [rounded(bytes_text(v)) if v else "0" for v in x], grid=False)
    ticks(ax, "y", y, [rounded(seconds_text(v)) if v else "0" for v in y])


def _name(ax: Axes, point: OnFrontier, position: int, points: Sequence[OnFrontier]) -> None:
    """The answer, the knees and the ends are named; the rest is in the table."""
    words = f"this plan{' (knee)' * point.knee}" if point.is_answer else "knee" * point.knee
    if not words and position not in (0, len(points) - 1):
        return
    x, y = point.predicted.peak_memory_bytes, point.predicted.step_seconds
    end = ax.get_xlim()[1]
    if not words and any(
        p.is_answer
        and abs(p.predicted.peak_memory_bytes - x) < 0.3 * end
        and abs(p.predicted.step_seconds - y) < 0.12 * ax.get_ylim()[1]
        for p in points
    ):
        return
    words = words or seconds_text(y)
    align = "right" if x > 0.6 * end else "left"
    below = align == "right" and y > 0.12 * ax.get_ylim()[1]
    offset = -8 if align == "right" else 8, -15 if below else 8
    label(ax, x, y, words, "ink", offset, align, point.is_answer)


def _find_frontier(plan: PlanFile) -> str:
    """The cost of the knees of the frontier."""
    points = choices.frontier(plan)
    if not points:
        return "Time against memory"
    knees = [p for p in points if p.knee]
    text = f"{plural(len(points), 'Pareto-optimal layout')} in time and memory"
    if not knees:
        return text
    told = [_against(p, plan) for p in knees[:2]]
    return f"{text}; {'knees' if len(knees) > 1 else 'the knee'} at {' and '.join(told)}"


def _against(point: OnFrontier, plan: PlanFile) -> str:
    if point.is_answer:
        return "this plan"
    its, own = point.predicted, plan.predicted
    step = signed_percent(its.step_seconds / own.step_seconds - 1) if own.step_seconds else ""
    memory = (its.peak_memory_bytes, own.peak_memory_bytes)
    peak = signed_percent(memory[0] / memory[1] - 1) if memory[1] else ""
    return f"{bytes_text(memory[0])} ({peak} memory, {step} time relative to this plan)"


def _panel(sheet: FigureSheet, ax: Axes, one: FactorCurve, letters: dict[str, str]) -> None:
    done = [(t.value, t.step_seconds, t) for t in one.trials if t.step_seconds is not None and t.value > 0]
    values = [t.value for t in one.trials if t.value > 0] or [1.0]
    ax.set_xscale("log")
    ax.set_xlim(*padded(values, 0.03))
    top = max((s for _, s, _ in done), default=1.0) * 1.22 or 1.0
    if one.factor == "devices" and done:
        ax.set_yscale("log")
        ideal = [done[0][1] * done[0][0] / v for v, _, _ in done]
        ax.set_ylim(*padded([*ideal, *(s for _, s, _ in done)], 0.22))
        y = log_steps(*ax.get_ylim(), 3)
    else:
        ax.set_ylim(0, top)
        y = round_steps(top, 3)
    ticks(ax, "y", y, [rounded(seconds_text(v)) if v else "0" for v in y])
    shown = values if len(values) <= 6 else log_steps(min(values), max(values), 6)
    ticks(ax, "x", shown, [factor_value(one.factor, v) for v in shown], grid=False)
    if one.factor == "devices" and len(done) > 1:
        ax.plot([v for v, _, _ in done], ideal, color=LIGHT["other"], linewidth=1, linestyle=(0, (4, 3)))
        label(ax, done[-1][0], ideal[-1], "ideal", "muted", (-16, -11), "right")
    (marks,) = ax.plot(
        [v for v, _, _ in done],
        [s for _, s, _ in done],
        "-o",
        color=LIGHT["compute"],
        linewidth=1.75,
        markersize=5,
        clip_on=False,
    )
    sheet.tip(marks, *(f"{factor_value(one.factor, v)}: {seconds_text(s)}" for v, s, _ in done))
    before = None
    for value, step, trial in done:
        if trial.layout and trial.layout != before:
            label(ax, value, step, letters[trial.layout], "ink", (0, 8), "center", True)
        before = trial.layout
    for trial in one.trials:
        if trial.step_seconds is None and trial.value > 0:
            words, role = ("nothing fits", "bad") if trial.proven else ("unknown", "muted")
            label(ax, trial.value, ax.get_ylim()[0], words, role, (-6, 14))


def _find_sensitivity(plan: PlanFile) -> str:
    """The effect of the largest change of each factor."""
    parts = []
    for one in plan.details.sensitivity:
        done: list[tuple[Trial, float]] = [(t, t.step_seconds) for t in one.trials if t.step_seconds]
        if len(done) < 2:
            continue
        (first, slow), (last, fast) = done[0], done[-1]
        changes = sum(1 for (a, _), (b, _) in pairwise(done) if a.layout != b.layout)
        layouts = f", {plural(changes, 'change')} of layout" if changes else ""
        ratio = times_text(slow / fast) if fast <= slow else f"1/{times_text(fast / slow)}"
        low, high = factor_value(one.factor, first.value), factor_value(one.factor, last.value)
        parts.append(f"{one.factor} from {low} to {high}: {ratio} the speed{layouts}")
    return "; ".join(parts) or "How the best step time depends on the hardware"


def _no_frontier(plan: PlanFile) -> str:
    if len(choices.frontier(plan)) > 1:
        return ""
    if plan.frontier:
        return "there is no trade-off: the fastest layout also needs the least memory"
    return "to include this section, run `layoutopt search MODEL --objective pareto --out PLAN.json`"


@chart("Time against memory", _find_frontier, layouts.frontier, _no_frontier)
def frontier(plan: PlanFile, title: str = "") -> Figure:
    """Step time against peak memory; the line joins the layouts that no other beats in both."""
    points = choices.frontier(plan)
    sheet = FigureSheet(PLOT + 74, title)
    sheet.text(MARGIN, 11, "step time", "muted", SMALL)
    ax = sheet.axes(58, 24, WIDTH - 70, PLOT)
    limit = plan.memory_limit
    places = [(p.predicted.peak_memory_bytes, p.predicted.step_seconds) for p in points]
    peaks, steps_ = zip(*places, strict=True)
    right: float = max(peaks)
    if limit and limit < 1.6 * right:
        right = max(right, limit)
    _range(ax, right * 1.08, max(steps_) * 1.12)
    ax.plot(peaks, steps_, color=LIGHT["compute"], linewidth=1.75, drawstyle="steps-post", clip_on=False)
    marks = dots(ax, places, "compute", 5)
    sheet.tip(marks, *(f"{seconds_text(s)} with {bytes_text(m)}" for m, s in places), near=True)
    for i, point in enumerate(points):
        if point.is_answer:
            dots(ax, places[i : i + 1], "ink", 9)
        elif point.knee:
            dots(ax, places[i : i + 1], "exposed", 8, "D")
        _name(ax, point, i, points)
    if limit and limit <= right:
        ax.plot([limit, limit], ax.get_ylim(), color=LIGHT["bad"], linewidth=1.75, clip_on=False)
        label(ax, limit, ax.get_ylim()[1], f"limit {bytes_text(limit)}", "bad", (0, 4), "right")
    sheet.text(WIDTH - MARGIN, PLOT + 62, "peak memory per device", "muted", SMALL, "right")
    return sheet.figure


@chart(
    "Sensitivity",
    _find_sensitivity,
    tables.sensitivity,
    lambda plan: "" if any(s.trials for s in plan.details.sensitivity) else COMPARE,
)
def sensitivity(plan: PlanFile, title: str = "") -> Figure:
    """One panel per factor; a letter where the best layout changes."""
    found = plan.details.sensitivity
    sheet = FigureSheet((PANEL + 20) * len(found), title)
    letters = layout_letters(plan)
    for position, one in enumerate(found):
        top = (PANEL + 20) * position
        factor = FACTORS.get(one.factor, shorten(one.factor, 30))
        sheet.text(MARGIN, top + 13, f"Step time by {factor}", bold=True, size=SMALL)
        ax = sheet.axes(58, top + 34, WIDTH - 78, PANEL - 56)
        _panel(sheet, ax, one, letters)
    return sheet.figure
