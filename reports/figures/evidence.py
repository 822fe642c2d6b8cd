"""The reliability of the numbers: predicted against measured steps, residuals of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layoutopt.plan.evidence import MeasuredLayout, Sample, Validation, typical, typical_of
from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import (
    digits,
    layout_text,
    percent,
    plural,
    rounded,
    seconds_text,
    shorten,
    signed_percent,
)
from reports.figures.chart import chart, log_steps, padded
from reports.figures.sheet import MARGIN, SMALL, WIDTH, FigureSheet, dots, label, ticks
from reports.tables import rows as tables
from reports.theme import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VALIDATE = (
    "to measure step times, run `layoutopt validate MODEL --out V.json`; to show them, run `layoutopt "
    "report PLAN.json --validation V.json`"
)
CALIBRATE = (
    "to include this section, run `layoutopt calibrate --out PROFILE.json`, then search with "
    "`--hardware PROFILE.json`"
)
SQUARE = 316.0
BAND = 0.2
PANEL = 128.0
MOST_PANELS = 6


def _said(row: MeasuredLayout, layout: str) -> str:
    told, measured = seconds_text(row.predicted_seconds), seconds_text(row.measured_seconds)
    return f"{layout or 'replicated'}: {told} predicted, {measured} measured"


def _mark_chosen(ax: Axes, plan: PlanFile, rows: Sequence[MeasuredLayout]) -> None:
    text = layout_text(plan.layout)
    for row in rows:
        if row.layout == text:
            dots(ax, [(row.measured_seconds, row.predicted_seconds)], "ink", 9)
            label(ax, row.measured_seconds, row.predicted_seconds, "this plan", "ink", (9, -4), bold=True)
            return


def _find_predicted_measured(plan: PlanFile) -> str:
    """The error, and the time lost by choosing by prediction."""
    found = plan.details.validation
    if found is None or not found.timed:
        return "Predicted against measured"
    parts = [f"{plural(len(found.timed), 'layout')} measured"]
    if found.mape is not None:
        parts.append(f"mean error of predictions {percent(found.mape)}")
    if found.kendall_tau is not None:
        parts.append(f"rank correlation {digits(found.kendall_tau, 2).replace('-', '−')} (Kendall's τ)")
    if found.regret is not None:
        parts.append(
            "the layout with the lowest predicted time is also the fastest measured"
            if found.regret <= 0
            else (
                f"the layout with the lowest predicted time is {percent(found.regret)} slower than the "
                "fastest measured"
            )
        )
    return "; ".join(parts)


def _residuals(ax: Axes, samples: Sequence[Sample]) -> Any:
    """Draws the errors; gives the dots."""
    sizes = [max(s.size, 1.0) for s in samples]
    reach = max(0.1, max(abs(s.residual) for s in samples)) * 1.15
    ax.set_xscale("log")
    ax.set_xlim(*padded(sizes, 0.04))
    ax.set_ylim(-reach, reach)
    marks = [-reach / 1.15, 0.0, reach / 1.15]
    ticks(ax, "y", marks, [signed_percent(m) for m in marks])
    shown = log_steps(min(sizes), max(sizes), 5)
    ticks(ax, "x", shown, [_size(v) for v in shown], grid=False)
    ax.plot(ax.get_xlim(), [0, 0], color=LIGHT["muted"], linewidth=1)
    return dots(ax, zip(sizes, (s.residual for s in samples), strict=True), "compute", 5)


def _size(value: float) -> str:
    """A size without a unit: bytes of a message, FLOPs of a product."""
    names = ("", "k", "M", "G", "T", "P")
    power = 0
    while value >= 999.5 and power < len(names) - 1:
        value, power = value / 1000, power + 1
    return f"{rounded(digits(value))}{names[power]}"


def _find_calibration(plan: PlanFile) -> str:
    """The errors of the fit on its measurements."""
    found = plan.details.calibration
    if found is None or not found.samples:
        return "Calibration"
    worst = max(found.samples, key=lambda s: abs(s.residual))
    fitted, unseen = typical_of(found, held_out=False), typical_of(found, held_out=True)
    said = "" if fitted is None else f"median error of the fit {percent(fitted)}, "
    if unseen is not None:
        said = f"median error on held-out operations {percent(unseen)}, "
    return (
        f"{plural(len(found.samples), found.of)}; {said}worst {signed_percent(worst.residual)} "
        f"({shorten(worst.what, 30)})"
    )


@chart(
    "Predicted against measured",
    _find_predicted_measured,
    tables.validation,
    lambda plan: "" if plan.details.validation and plan.details.validation.timed else VALIDATE,
)
def predicted_measured(plan: PlanFile, title: str = "") -> Figure:
    """One dot per layout on two equal logarithmic scales; on the line the prediction is exact."""
    rows = (plan.details.validation or Validation()).timed
    sheet = FigureSheet(SQUARE + 74, title)
    sheet.text(MARGIN, 11, "predicted step time", "muted", SMALL)
    ax = sheet.axes(60, 24, SQUARE, SQUARE)
    low, high = padded([v for r in rows for v in (r.predicted_seconds, r.measured_seconds)])
    shown = log_steps(low, high)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    names = [rounded(seconds_text(v)) for v in shown]
    ticks(ax, "x", shown, names)
    ticks(ax, "y", shown, names)
    ends = [low, high]
    ax.fill_between(
        ends, [v * (1 - BAND) for v in ends], [v * (1 + BAND) for v in ends], color=LIGHT["grid"], linewidth=0
    )
    ax.plot(ends, ends, color=LIGHT["muted"], linewidth=1)
    places = [(r.measured_seconds, r.predicted_seconds) for r in rows]
    marks = dots(ax, places, "compute", 5.5, alpha=0.85)
    sheet.tip(marks, *(_said(r, shorten(r.layout, 80)) for r in rows))
    _mark_chosen(ax, plan, rows)
    sheet.rect(230, 2, 10, 10, "grid")
    sheet.text(245, 11, f"within {percent(BAND)} of measured", "muted", SMALL)
    sheet.text(60 + SQUARE, SQUARE + 64, "measured step time", "muted", SMALL, "right")
    return sheet.figure


@chart(
    "Calibration",
    _find_calibration,
    tables.calibration_kinds,
    lambda plan: "" if plan.details.calibration and plan.details.calibration.samples else CALIBRATE,
)
def calibration(plan: PlanFile, title: str = "") -> Figure:
    """A panel per kind of measurement: the fit's error at every size."""
    groups = tables.calibration_groups(plan)[:MOST_PANELS]
    sheet = FigureSheet((PANEL + 16) * len(groups), title)
    for position, (what, samples) in enumerate(groups):
        top = (PANEL + 16) * position
        sheet.text(MARGIN, top + 13, shorten(what, 40), bold=True, size=SMALL)
        error = f"median error {percent(typical(samples) or 0.0)}"
        sheet.text(WIDTH - MARGIN, top + 13, error, "muted", SMALL, "right")
        marks = _residuals(sheet.axes(58, top + 24, WIDTH - 78, PANEL - 48), samples)
        sheet.tip(
            marks, *(f"{seconds_text(s.measured_seconds)}: {signed_percent(s.residual)}" for s in samples)
        )
    return sheet.figure
