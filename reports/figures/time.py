"""The step's time by layout, by kind of work, and of the most expensive operations."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from layoutopt.plan.details import TimeShares
from layoutopt.plan.schema import PlanFile, Predicted
from layoutopt.plan.units import percent, seconds_text, shorten, step_change, times_text
from reports.figures.bars import Bar, Bars, BarSegment, cut_scale
from reports.figures.chart import SEARCH, chart
from reports.figures.sheet import MARGIN, SMALL, WIDTH, FigureSheet
from reports.tables import rows as tables
from reports.views.choices import Ranked, best_alternative, ranked
from reports.views.layouts import layouts
from reports.views.work import collective_name, is_collective, shares, work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LAYOUTS = 10
MOST_KINDS = 12
MOST_COLUMNS = 4
MOST_OPERATIONS = 12
KEY = (
    ("compute", "compute"),
    ("hidden", "compute overlapped with communication"),
    ("exposed", "exposed communication"),
    ("muted", "the host launches kernels"),
)
UNFIT = "does not fit"
FIT = {True: "", False: UNFIT, None: "undecided"}
"""The words for `feasible`."""


def key_of(bars: Sequence[Bar]) -> list[tuple[str, str]]:
    """The key without quantities that no bar shows."""
    shown = {part.token for bar in bars for part in bar.parts if part.size > 0}
    return [(token, words) for token, words in KEY if token in shown]


def time_parts(p: Predicted) -> tuple[BarSegment, ...]:
    """The parts of a step's time."""
    hidden, host = p.hidden_seconds, p.step_seconds - p.device_seconds if p.host_seconds else 0.0
    sizes = (p.compute_seconds - hidden, hidden, p.exposed_communication_seconds, host)
    return tuple(
        BarSegment(size, token, f"{seconds_text(size)} {words}")
        for size, (token, words) in zip(sizes, KEY, strict=True)
    )


def _time_bar(row: Ranked) -> Bar:
    predicted = row.choice.predicted
    name = "This plan" if row.is_answer else row.names
    if predicted is None:
        return Bar(name, "", note="no predicted time", faint=True)
    value = seconds_text(predicted.step_seconds)
    if row.ratio is not None and not row.is_answer:
        value += f" · {times_text(row.ratio)}"
    return Bar(
        name=name,
        value=value,
        parts=time_parts(predicted),
        note=FIT[row.choice.feasible],
        note_token="muted" if row.choice.feasible else "bad",
        bold=row.is_answer,
        faint=not row.choice.feasible,
    )


def _find_step_time(plan: PlanFile) -> str:
    p = plan.predicted
    share = percent(p.exposed_communication_seconds / p.step_seconds) if p.step_seconds else percent(0)
    text = f"Exposed communication takes {share} of the step"
    other = best_alternative(plan)
    if other is None or other.ratio is None:
        return text
    name = shorten(other.names, 40)
    if other.ratio >= 1:
        return f"{text}; the best alternative that fits, {name}, takes {step_change(other.ratio, 1.0)}"
    return f"{text}; {name} is predicted to be faster, at {times_text(other.ratio)} the time"


def _kinds(plan: PlanFile) -> list[str]:
    """Kinds by the answer's time, then by the most time that a layout beside it has."""
    found = [share for _, share in _columns(plan)]
    names = {kind for s in found for kind, value in s.kinds.items() if value > 0}
    first = found[0].kinds if found else {}
    return sorted(names, key=lambda k: (-first.get(k, 0.0), -max(s.kinds.get(k, 0.0) for s in found), k))


def _columns(plan: PlanFile) -> list[tuple[str, TimeShares]]:
    """The layouts to compare: the answer, those that fit, then the others."""
    order = {r.choice.name: i for i, r in enumerate(ranked(plan))}
    known = {"answer", *order} | (shares(plan).keys() - {a.name for a in plan.alternatives})
    found = [(name, share) for name, share in shares(plan).items() if name in known]
    return sorted(found, key=lambda x: (x[0] != "answer", order.get(x[0], len(order))))[:MOST_COLUMNS]


def unfit(plan: PlanFile) -> frozenset[str]:
    """Names of the alternatives that are no possible choice."""
    return frozenset(a.name for a in plan.alternatives if not a.feasible)


def _header(sheet: FigureSheet, x: float, width: float, name: str, bold: bool) -> None:
    """A column's name on up to two lines."""
    fit = max(4, int((width - 4) / (0.6 * SMALL)))
    lines = textwrap.wrap(name, fit, max_lines=2, placeholder="…") or [""]
    for position, line in enumerate(lines[::-1]):
        sheet.text(x + 3, 28 - 14 * position, line, "ink" if bold else "muted", SMALL, bold=bold)


def _find_time_by_kind(plan: PlanFile) -> str:
    """The largest kinds of the answer."""
    found = shares(plan)
    if "answer" not in found:
        return "Time by kind of work"
    kinds = found["answer"].kinds
    total = sum(kinds.values())
    if not total:
        return "This plan records no time for any kind of work"
    top = _kinds(plan)[0]
    name = collective_name(top) if is_collective(top) else top
    sent = sum(v for k, v in kinds.items() if is_collective(k))
    return (
        f"{shorten(name, 40)} takes the most time ({percent(kinds[top] / total)} of the total); "
        f"collectives, hidden and exposed, take {percent(sent / total)}"
    )


def _find_operations(plan: PlanFile) -> str:
    """The concentration of the time on few operations."""
    rows = work(plan)
    total = sum(w.seconds for w in rows)
    if not total:
        return "No operation takes time"
    few = min(3, len(rows))
    share = sum(w.seconds for w in rows[:few]) / total
    said = f"the {few} slowest of {len(rows):,} operations take {percent(share)} of the step"
    return f"{said}; the slowest is {shorten(rows[0].name, 48)}"


@chart("Step time by layout", _find_step_time, layouts)
def step_time(plan: PlanFile, title: str = "") -> Figure:
    """One bar per layout: compute, the compute that hides communication, and exposed communication add up."""
    rows = ranked(plan)[:MOST_LAYOUTS]
    possible = [r.choice.predicted.step_seconds for r in rows if r.choice.predicted and r.choice.feasible]
    high = cut_scale(possible, plan.predicted.step_seconds)
    bars = [_time_bar(r) for r in rows]
    return Bars(bars, high, key=key_of(bars)).draw(title).figure


@chart(
    "Time by kind of work",
    _find_time_by_kind,
    tables.time_by_kind,
    lambda plan: "" if any(s.kinds for s in shares(plan).values()) else SEARCH,
)
def time_by_kind(plan: PlanFile, title: str = "") -> Figure:
    """A table of bars: a row per kind of work, a column per layout, one scale."""
    columns = _columns(plan)
    kinds = _kinds(plan)[:MOST_KINDS]
    high = (
        max(
            (s.kinds.get(k, 0.0) for name, s in columns if name not in unfit(plan) for k in kinds),
            default=0.0,
        )
        or 1.0
    )
    left = 112.0
    width = (WIDTH - left - MARGIN) / max(len(columns), 1)
    row = 34.0
    sheet = FigureSheet(38 + row * len(kinds), title)
    for c, (name, _) in enumerate(columns):
        _header(sheet, left + c * width, width, "this plan" if name == "answer" else name, bold=c == 0)
    for k, kind in enumerate(kinds):
        y = 38 + row * k
        words = collective_name(kind) if is_collective(kind) else kind
        sheet.text(MARGIN, y + 23, shorten(words, 16), size=SMALL)
        for c, (name, share) in enumerate(columns):
            value = share.kinds.get(kind, 0.0)
            x = left + c * width
            sheet.text(x + 3, y + 12, seconds_text(value) if value else "–", "muted", 10.5)
            if value:
                token = "exposed" if is_collective(kind) else "compute"
                length = max((width - 12) * min(value / high, 1.0), 0.75)
                hatch = "////" if name in unfit(plan) else ""
                sheet.rect(x, y + 16, length, 9, token, hatch, f"{words}: {seconds_text(value)}")
                if value > high:
                    sheet.text(x + length + 1, y + 24, "›", "muted", SMALL, bold=True)
    for c in range(len(columns)):
        x = left + c * width - 0.5
        sheet.line([(x, 40), (x, 36 + row * len(kinds))], "rule")
    return sheet.figure


@chart(
    "Slowest operations",
    _find_operations,
    tables.operations,
    lambda plan: "" if plan.details.lines else SEARCH,
)
def operations(plan: PlanFile, title: str = "") -> Figure:
    """One bar per operation and phase: computation and the communication that the step waits for."""
    rows = work(plan)[:MOST_OPERATIONS]
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
