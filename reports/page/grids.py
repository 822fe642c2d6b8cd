"""The tables beside the figures."""

from __future__ import annotations

from collections.abc import Sequence

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import (
    layout_text,
    memory,
    mesh_text,
    percent,
    seconds,
    shorten,
    signed_percent,
    some,
    times,
)
from reports.figures.pieces import piece_shares
from reports.figures.tradeoffs import factor_value, layout_letters
from reports.page.cells import AxisTag, Cell, Column, PageTable, chips
from reports.plan import dims_on, lies_on, number_text
from reports.theme import axis_token
from reports.views.choices import Ranked, frontier, ranked
from reports.views.dims import dimension_rows
from reports.views.timeline import holdings_at_peak
from reports.views.variables import grouped, shape_text, split_text

MOST = 300
"""Rows of a table on the page; the CSV files have them all."""
LONGEST = 400
"""Characters of a layout beside others; the plan's own is written in full at the end."""


TYPED = ("Mesh", "Layout", "Command")
"""Facts that readers type elsewhere."""


def axes(plan: PlanFile) -> PageTable:
    """The mesh's axes with what lies on them."""
    rows = []
    for axis, size in plan.mesh.items():
        alone = plan.predicted.communication_bytes_per_device.get(axis, 0.0)
        rows.append(
            [
                Cell(chips=(AxisTag(axis, axis_token(axis, plan.mesh)),), sub=lies_on(plan, axis)),
                Cell(f"{size:,}", value=size),
                Cell(some(dims_on(plan, axis), 24, 80) or "nothing"),
                Cell(memory(alone) if alone else "–", value=alone),
            ]
        )
    for key, sent in plan.predicted.communication_bytes_per_device.items():
        if key not in plan.mesh and sent:
            parts = key.split("+")
            rows.append(
                [
                    Cell(chips=chips(parts, list(plan.mesh))),
                    Cell("–"),
                    Cell("together"),
                    Cell(memory(sent), value=sent),
                ]
            )
    head = (
        Column("Axis", lead=True),
        Column("Size", True),
        Column("Dimensions split over it"),
        Column("A device sends per step", True),
    )
    return PageTable("Axes of the mesh", head, rows, shown=12)


def matrix(plan: PlanFile) -> PageTable:
    """Dimensions against axes, as the figure `matrix` draws it."""
    names = list(plan.mesh)
    found = dimension_rows(plan)
    rows = []
    for r in found[:MOST]:
        marks = [Cell("split", fill=axis_token(a, names)) if a in r.axes else Cell() for a in names]
        size, piece = (Cell(f"{n:,}", value=n) if n else Cell("–") for n in (r.size, r.piece))
        rows.append([Cell(r.name, strong=bool(r.axes)), size, *marks, piece])
    head = (
        Column("Dimension", lead=True),
        Column("Size", True),
        *(Column(f"{n} {plan.mesh[n]}", named=True) for n in names),
        Column("On a device", True),
    )
    longest = max([len(f"{n} {plan.mesh[n]}") for n in names] + [len(r.name) // 2 for r in found] + [0])
    return PageTable(
        "Dimensions against mesh axes",
        head,
        rows,
        shown=24,
        more=len(found) - len(rows),
        more_in="dims.csv",
        compact=len(names) <= 3 and longest <= 10,
    )


def variables(plan: PlanFile) -> PageTable:
    """Variables with the piece of each that a device holds; equal ones are one row."""
    found = grouped(plan)
    rows = []
    for v in found[:MOST]:
        alike = f"{v.alike} alike, " if v.alike > 1 else ""
        local = " × ".join(f"{n:,}" for n in v.local_shape(plan.mesh)) or "scalar"
        rows.append(
            [
                Cell(piece=piece_shares(v, plan)),
                Cell(v.name, f"{alike}{v.kind}, {v.dtype}", strong=True),
                Cell(shape_text(v), split_text(v)),
                Cell(local),
                Cell(
                    memory(v.local_bytes * v.alike),
                    f"of {memory(v.bytes * v.alike)}",
                    value=v.local_bytes * v.alike,
                ),
            ]
        )
    head = (
        Column("Piece"),
        Column("Variable", lead=True, share="24%"),
        Column("Shape and split"),
        Column("Piece's shape"),
        Column("Bytes on a device", True),
    )
    return PageTable(
        "Variables and the piece on a device",
        head,
        rows,
        shown=8,
        more=len(found) - len(rows),
        more_in="variables.csv",
    )


def layouts(plan: PlanFile) -> PageTable:
    """The answer and its alternatives."""
    rows = [_layout(plan, r) for r in ranked(plan)[:MOST]]
    head = (
        Column("Layout", lead=True, share="36%"),
        Column("Step", True),
        Column("Exposed", True),
        Column("Peak", True),
        Column("Fits"),
    )
    return PageTable(
        "Layouts and their prices",
        head,
        rows,
        shown=8,
        more=len(ranked(plan)) - len(rows),
        more_in="layouts.csv",
    )


def _layout(plan: PlanFile, r: Ranked) -> list[Cell]:
    c, p = r.choice, r.choice.predicted
    text = layout_text(c.layout).replace(";", "; ") or "replicated"
    where = f"{shorten(text, LONGEST)} on {shorten(mesh_text(c.mesh), LONGEST)}"
    where += f"; {c.in_short()}" if c.in_short() else ""
    name = Cell("This plan" if r.is_answer else r.names, where, strong=r.is_answer)
    over = p is not None and plan.memory_limit is not None and p.peak_memory_bytes > plan.memory_limit
    verdict = plan.fit_of(c)
    fits = Cell(verdict, (c.reason or ""), state={"barely": "warn", "no": "bad"}.get(verdict, ""))
    if p is None:
        return [name, Cell("–"), Cell("–"), Cell("–"), Cell("no price", (c.reason or ""), state="bad")]
    ratio = times(r.ratio) if r.ratio is not None and not (r.is_answer or r.twin) else ""
    return [
        name,
        Cell(seconds(p.step_seconds), ratio, value=p.step_seconds),
        Cell(seconds(p.exposed_communication_seconds), value=p.exposed_communication_seconds),
        Cell(memory(p.peak_memory_bytes), state="bad" if over else "", value=p.peak_memory_bytes),
        fits,
    ]


def holdings(plan: PlanFile) -> PageTable:
    """Tensors at the peak, beyond the few that the figure names."""
    found = plan.details.memory
    held = holdings_at_peak(found) if found else ()
    peak = found.points[found.peak].bytes if found and found.points else 0.0
    rows = [
        [
            Cell(h.name, h.scope),
            Cell(memory(h.bytes), value=h.bytes),
            Cell(percent(h.bytes / peak) if peak else "–", value=h.bytes),
        ]
        for h in held[:MOST]
    ]
    head = (Column("Held at the peak", lead=True), Column("Bytes", True), Column("Share", True))
    return PageTable(
        "Tensors held at the peak of memory",
        head,
        rows,
        more=len(held) - len(rows),
        more_in="peak.csv",
        folded=f"All {sum(h.alike for h in held):,} tensors held at the peak",
    )


def frontier_points(plan: PlanFile) -> PageTable:
    """The frontier's points, knees marked."""
    rows = []
    for f in frontier(plan)[:MOST]:
        marks = ", ".join(w for w, on in (("this plan", f.is_answer), ("knee", f.knee)) if on)
        text = layout_text(f.choice.layout).replace(";", "; ") or "replicated"
        where = f"on {mesh_text(f.choice.mesh)}"
        against = (
            signed_percent(f.predicted.step_seconds / plan.predicted.step_seconds - 1)
            if plan.predicted.step_seconds
            else ""
        )
        rows.append(
            [
                Cell(shorten(text, LONGEST), "; ".join(x for x in (where, f.choice.in_short()) if x)),
                Cell(memory(f.predicted.peak_memory_bytes), value=f.predicted.peak_memory_bytes),
                Cell(
                    seconds(f.predicted.step_seconds),
                    "" if f.is_answer else against,
                    value=f.predicted.step_seconds,
                ),
                Cell(marks, strong=True),
            ]
        )
    head = (
        Column("Layout", lead=True),
        Column("Peak memory", True),
        Column("Step time", True),
        Column("Mark", short=True),
    )
    return PageTable("Points of the frontier", head, rows, shown=8)


def curve_layouts(plan: PlanFile) -> PageTable:
    """What the letters of the sensitivity curves stand for, and where each layout is best."""
    rows = []
    for text, mark in list(layout_letters(plan).items())[:MOST]:
        where = []
        for s in plan.details.sensitivity:
            values = [
                factor_value(s.factor, t.value)
                for t in s.trials
                if t.layout == text and t.step_seconds is not None
            ]
            if values:
                where.append(f"{s.factor} {values[0]}" + (f" to {values[-1]}" if len(values) > 1 else ""))
        rows.append(
            [Cell(mark, strong=True), Cell(shorten(text.replace(";", "; "), LONGEST)), Cell("; ".join(where))]
        )
    return PageTable(
        "Layouts of the curves",
        (Column("Mark", lead=True), Column("Layout"), Column("Best at")),
        rows,
        shown=8,
    )


def measured(plan: PlanFile) -> PageTable:
    """Layouts by measured time."""
    found = (
        sorted(plan.details.validation.timed, key=lambda r: r.measured_seconds)
        if plan.details.validation
        else []
    )
    rows = [
        [
            Cell(r.layout.replace(";", "; ") or "replicated"),
            Cell(seconds(r.predicted_seconds), value=r.predicted_seconds),
            Cell(seconds(r.measured_seconds), value=r.measured_seconds),
            Cell(signed_percent(error), value=error),
        ]
        for r in found[:MOST]
        for error in (r.predicted_seconds / r.measured_seconds - 1,)
    ]
    head = (
        Column("Layout", lead=True),
        Column("Predicted", True),
        Column("Measured", True),
        Column("Error", True),
    )
    return PageTable(
        "Predicted and measured step times",
        head,
        rows,
        shown=8,
        more=len(found) - len(rows),
        more_in="validation.csv",
    )


def fit(plan: PlanFile) -> PageTable:
    """The fitted numbers."""
    found = plan.details.calibration.fit if plan.details.calibration else ()
    rows = [[Cell(f.name), Cell(number_text(f.value, f.unit))] for f in found[:MOST]]
    return PageTable(
        "Fitted numbers", (Column("Fitted number", lead=True), Column("Value", True)), rows, shown=10
    )


def numbers(plan: PlanFile) -> PageTable:
    """Hardware numbers; assumptions first, because they are what to doubt."""
    found = (
        sorted(plan.details.hardware.numbers, key=lambda n: not n.assumed) if plan.details.hardware else []
    )
    rows = [
        [
            Cell(n.path),
            Cell(number_text(n.value, n.unit)),
            Cell(n.source, n.date, state="warn" if n.assumed else ""),
        ]
        for n in found[:MOST]
    ]
    head = (Column("Number", lead=True, share="26%"), Column("Value", True), Column("Source"))
    return PageTable(
        "Hardware numbers and their sources",
        head,
        rows,
        shown=10,
        more=len(found) - len(rows),
        more_in="assumptions.csv",
    )


def record(pairs: Sequence[tuple[str, str]], caption: str) -> PageTable:
    """Names and values."""
    rows = [[Cell(name, strong=True), Cell(value, code=name in TYPED)] for name, value in pairs if value]
    head = (Column("What", lead=True, share="13em"), Column("Value"))
    return PageTable(caption, head, rows, shown=99, fixed=True)


def repairs(plan: PlanFile) -> PageTable:
    """What would help where nothing fits, with the command lines."""
    rows = [
        [
            Cell(each.change, each.note, strong=True),
            Cell(seconds(each.step_seconds), "" if each.proven else "not proven", value=each.step_seconds),
            Cell(percent(each.mfu) if each.mfu is not None else "–", value=each.mfu),
            Cell(
                memory(each.peak_memory_bytes),
                f"of {memory(each.memory_bytes)}",
                value=each.peak_memory_bytes,
            ),
            Cell(shorten(each.layout, LONGEST) or "replicated", each.decided),
            Cell(each.command, code=True),
        ]
        for each in plan.details.repairs
    ]
    head = (
        Column("Change", lead=True),
        Column("Step", True),
        Column("MFU", True),
        Column("A device holds", True),
        Column("Layout"),
        Column("Command", share="34%"),
    )
    return PageTable("Changes under which it fits", head, rows, shown=12)
