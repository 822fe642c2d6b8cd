"""The sections of the page, in reading order: the splits, their cost, their reliability."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from layoutopt.plan.evidence import Validation
from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import (
    against,
    digits,
    gap_text,
    layout_text,
    letter,
    mesh_option,
    plural,
    seconds_text,
    shorten,
    words_of,
)
from reports import figures
from reports.figures import Chart
from reports.page import cells, compare
from reports.page.cells import LEADS, Control, PageBlock, Panel, Section, grid
from reports.plan import rules, words
from reports.svg import figure_svg
from reports.tables import rows
from reports.views import facts as told
from reports.views.curves import FACTORS, factor_value, layout_letters
from reports.views.layouts import layouts, record, repairs
from reports.views.view import View

LONGEST = 8000
"""Characters of a layout; no layout of real names is as long."""
Build = Callable[[PlanFile, str], tuple[PageBlock, ...]]


def sections(plans: Sequence[PlanFile]) -> tuple[Section, ...]:
    """All sections; with several plans each has a panel per plan."""
    several = len(plans) > 1
    with_variables = several and any(p.details.variables for p in plans)
    helps = any(p.details.repairs for p in plans)
    return (
        *((_section("repairs", "What would fit", plans, _repairs),) if helps else ()),
        _section("mesh", "The mesh", plans, _mesh),
        _joint("split", "What is split", compare.splits(plans))
        if several
        else _section("split", "What is split", plans, _tabled(figures.matrix)),
        _joint("pieces", "What a device stores", compare.pieces(plans))
        if with_variables
        else _section("pieces", "What a device stores", plans, _tabled(figures.pieces)),
        _section("time", "Where the time goes", plans, _time),
        _section("memory", "Memory", plans, _memory),
        _section(
            "frontier", "Time against memory", plans, lambda p, n: (_chart(figures.frontier, p, n, True),)
        ),
        _section("sensitivity", "If the hardware were different", plans, _sensitivity),
        _section("operations", "Slowest operations", plans, _tabled(figures.operations)),
        _section("evidence", "Predicted and measured", plans, _evidence, lambda p: p.details.validation),
        _section("calibration", "Calibration", plans, _calibration, lambda p: p.details.calibration),
        _section("assumptions", "Assumptions and sources", plans, _assumptions, lambda p: p.details.hardware),
        _section("record", "The plan in full", plans, _record),
    )


def _joint(id: str, title: str, view: View) -> Section:
    """One table of all plans."""
    return Section(id, title, LEADS["plan"][id], shared=(PageBlock(grid=grid(view)),))


def _section(
    id: str,
    title: str,
    plans: Sequence[PlanFile],
    build: Build,
    same: Callable[[PlanFile], object] | None = None,
) -> Section:
    """A panel per plan; one for all where what `same` looks at is the same in all plans."""
    if same is not None and all(same(p) == same(plans[0]) for p in plans):
        plans = plans[:1]
    panels = []
    for i, plan in enumerate(plans):
        name = letter(i) if len(plans) > 1 else ""
        panels.append(Panel(name, shorten(plan.model.name, 60), build(plan, f"{id}-{letter(i).lower()}")))
    if all(b.missing for p in panels for b in p.blocks):
        return Section(id, title, "", missing=panels[0].blocks[0].missing)
    return Section(id, title, LEADS["plan"][id], tuple(panels))


def _chart(chart: Chart, plan: PlanFile, name: str, tabled: View | bool = False) -> PageBlock:
    """A figure with its finding, or the command that adds its data.

    Args:
      tabled: the table below: the figure's own view, or another one.
    """
    if missing := chart.missing(plan):
        return PageBlock(missing=missing)
    own = chart.view(plan)
    svg = figure_svg(chart(plan, titled=False), f"{name}-{chart.name}", chart.title, own.in_words())
    view = tabled if isinstance(tabled, View) else own
    return PageBlock(chart.find(plan), svg, grid(view) if tabled and view.rows else None)


def _repairs(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    found, conflict = plan.details.repairs, plan.details.conflict
    if not found:
        return (PageBlock(missing="if no layout fits, `layoutopt search` lists changes that make one fit"),)
    notes = [f"These constraints conflict: {', '.join(conflict)}."] if len(conflict) > 1 else []
    finding = (
        f"{plural(len(found), 'change')} with which the plan fits, each with its own search, fastest first"
    )
    return (PageBlock(finding, grid=grid(repairs(found)), notes=tuple(notes)),)


def _mesh(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    block = _chart(figures.mesh, plan, name, True)
    hardware = plan.details.hardware
    said = (
        (hardware.placement, hardware.summary, hardware.device and f"A device is {hardware.device}.")
        if hardware
        else ()
    )
    return (replace(block, notes=tuple(s for s in said if s)),)


def _tabled(chart: Chart) -> Build:
    """The data of a figure as a table, where a table reads better on a page."""

    def build(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
        if missing := chart.missing(plan):
            return (PageBlock(missing=missing),)
        return (PageBlock(chart.find(plan), grid=grid(chart.view(plan))),)

    return build


def _time(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    return (
        _chart(figures.step_time, plan, name),
        _chart(figures.time_by_kind, plan, name),
        PageBlock(grid=grid(layouts(plan))),
        *([PageBlock(grid=grid(rows.slots(plan)))] if plan.details.slots else []),
    )


def _memory(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    return (
        _chart(figures.memory_by_layout, plan, name),
        _chart(figures.memory_timeline, plan, name),
        *(
            [PageBlock(grid=grid(rows.peak(plan)))]
            if plan.details.memory and plan.details.memory.holdings
            else []
        ),
    )


def _sensitivity(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    block = _chart(figures.sensitivity, plan, name, rows.curve_layouts(plan))
    robust = plan.details.robustness
    said = told.robust(robust) if robust is not None else ""
    notes = (f"This plan is {said}.",) if said else ()
    return (replace(block, notes=notes, controls=controls(plan, name)),)


def _evidence(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    block = _chart(figures.predicted_measured, plan, name, True)
    found = plan.details.validation or Validation()
    return (replace(block, notes=(*filter(None, (found.noise.words,)), *found.notes)),)


def _calibration(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    block = _chart(figures.calibration, plan, name, rows.fitted(plan))
    found = plan.details.calibration
    return (replace(block, notes=found.notes if found else ()),)


def _assumptions(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    hardware = plan.details.hardware
    if hardware is None or not (hardware.numbers or hardware.assumptions):
        return (
            PageBlock(
                "This plan records no sources",
                missing=("to show the source of each number, run `layoutopt hardware NAME`"),
            ),
        )
    assumed = sum(n.assumed for n in hardware.numbers)
    finding = (
        f"{len(hardware.numbers)} numbers of {shorten(hardware.name, 40)}, {assumed} of them assumptions"
    )
    numbers = rows.assumptions(plan)
    return (PageBlock(finding, grid=grid(numbers) if numbers.rows else None, notes=hardware.assumptions),)


def _record(plan: PlanFile, name: str) -> tuple[PageBlock, ...]:
    s = plan.solver
    solver = (
        [
            ("Solver status", s.status),
            ("Objective", digits(s.objective, 6) if s.objective is not None else ""),
            ("Lower bound", digits(s.bound, 6) if s.bound is not None else ""),
            ("Gap", gap_text(s.gap) if s.gap is not None else ""),
            ("Search time", seconds_text(s.wall_seconds) if s.wall_seconds is not None else ""),
            ("Considered", told.considered(s.layouts_considered)),
        ]
        if s
        else []
    )
    pairs = [
        ("Model", plan.model.name),
        ("Fingerprint", plan.model.fingerprint),
        ("Parameters", f"{plan.model.parameters:,}" if plan.model.parameters else ""),
        ("Hyperparameters", words_of({name: words(value) for name, value in plan.model.hparams.items()})),
        ("Batch", told.batch(plan.model.batch)),
        ("Made from", plan.details.source),
        ("Rules of the search", rules(plan)),
        ("Proof checked again", plan.details.proof.words if plan.details.proof else ""),
        ("Hardware", plan.hardware),
        ("Framework", plan.framework or ""),
        ("Mesh", mesh_option(plan.mesh)),
        ("Layout", shorten(layout_text(plan.layout), LONGEST) or "replicated"),
        *(
            (name.capitalize(), words)
            for name, words in (*plan.listed().items(), *told.costs(plan), *told.left(plan))
        ),
        ("Command", plan.details.search.command if plan.details.search else ""),
        *solver,
    ]
    return (PageBlock(grid=grid(record(pairs, "The plan"), LONGEST), notes=tuple(plan.notes)),)


def controls(plan: PlanFile, name: str) -> tuple[Control, ...]:
    """A slider for every factor that was searched: the best step and its layout at each value."""
    letters, now = layout_letters(plan), plan.predicted.step_seconds
    found = []
    for n, one in enumerate(plan.details.sensitivity):
        said = []
        for t in one.trials:
            words = "nothing fits" if t.proven else "unknown"
            if t.step_seconds is not None:
                words = f"{seconds_text(t.step_seconds)} per step ({against(t.step_seconds, now)})"
                if t.layout:
                    shown = shorten(t.layout.replace(";", "; "), cells.LONGEST)
                    words += f", with layout {letters[t.layout]}: {shown}"
            said.append(f"{factor_value(one.factor, t.value)}: {words}")
        far = [abs((t.step_seconds or math.inf) - now) for t in one.trials]
        start = far.index(min(far)) if far else 0  # where the step is the plan's own
        if len(said) > 1:
            words = FACTORS.get(one.factor, shorten(one.factor, 30))
            found.append(Control(f"{name}-if{n}", f"If {words} were", tuple(said), start))
    return tuple(found)
