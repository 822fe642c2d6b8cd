"""The tables of layouts by predicted time, of the frontier, and of repairs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from layoutopt.plan.details import Repair
from layoutopt.plan.schema import Alternative, PlanFile
from layoutopt.plan.units import layout_text, mesh_option, used_text
from reports.theme import axis_token
from reports.views import choices
from reports.views.view import (
    BYTES,
    EVERYWHERE,
    FLAG,
    RULES,
    SECONDS,
    SHARE,
    TIMES,
    AxisTag,
    Cell,
    Column,
    View,
    ViewRow,
)

STATES = {"barely": "warn", "undecided": "warn", "no": "bad", "not legal": "bad"}
"""The marks on pages of layouts that do not fit well."""
TYPED = ("Mesh", "Layout", "Options", "Command")
"""Facts that readers type elsewhere."""


def chips(axes: Sequence[str], mesh: Collection[str]) -> tuple[AxisTag, ...]:
    """Axes in their colours; an axis that the mesh lacks (an alternative's own) is colourless."""
    return tuple(AxisTag(a, axis_token(a, mesh) if a in mesh else "muted") for a in axes)


def data(*keys: str) -> tuple[Column, ...]:
    """Columns that only data have."""
    return tuple(Column(key, key, on="data") for key in keys)


def layouts(
    plan: PlanFile,
    fits: Callable[[Alternative], str] | None = None,
    own: str = "This plan",
    lean: bool = False,
) -> View:
    """The answer and its alternatives with their prices; a layout of several names is there once.

    Args:
      fits: the fit of each layout in words; None: decided by the plan's own limit.
      own: name of the answer.
      lean: the search minimised memory.
    """
    rows = [*choices.ranked(plan)]
    if lean:
        rows.sort(key=lambda r: (not r.is_answer, _bytes(r.choice)))
    named = [(r.choice, own if r.is_answer else r.choice.name, r.others) for r in rows]
    return layout_table("Alternatives", "layout", named, plan, fits or plan.fit_of, lean)


def _bytes(choice: Alternative) -> float:
    return choice.predicted.peak_memory_bytes if choice.predicted else float("inf")


NamedAlternative = tuple[Alternative, str, Sequence[str]]
"""A layout, its name, and its other names."""


def layout_table(
    title: str,
    first: str,
    named: Sequence[NamedAlternative],
    plan: PlanFile,
    fits: Callable[[Alternative], str],
    lean: bool = False,
    name: str = "layouts",
    strong: int | None = 0,
) -> View:
    """Layouts by name with their prices, against the first of them."""
    meshes = {mesh_option(c.mesh or plan.mesh) for c, *_ in named}
    base = named[0][0].predicted if named else None
    utilised = all(c.predicted is None or c.predicted.mfu is not None for c, *_ in named)
    said = [fits(c) if c.predicted else "not legal" for c, *_ in named]

    def row(c: Alternative, name: str, others: Sequence[str], fit: str) -> ViewRow:
        p = c.predicted
        fitting = Cell(fit, state=STATES.get(fit, ""), value=c.feasible)
        called = Cell(", ".join((name, *others)), value=c.name)
        about = (called, ", ".join(others), mesh_option(c.mesh or plan.mesh), layout_text(c.layout))
        if p is None or base is None:
            return *about, c.in_short(), *(None,) * 8, fitting, c.reason
        step = Cell(f"≤ {SECONDS.say(p.step_seconds)}" if c.cut else "", value=p.step_seconds)
        times = (step, p.step_seconds / base.step_seconds if base.step_seconds else None)
        lean_ratio = p.peak_memory_bytes / base.peak_memory_bytes if base.peak_memory_bytes else None
        parts = (p.compute_seconds, p.exposed_communication_seconds, p.communication_seconds, p.mfu)
        return *about, c.in_short(), *times, *parts, float(p.peak_memory_bytes), lean_ratio, fitting, c.reason

    columns = (
        Column("name", first, lead=True, share="20%"),
        Column("others", "other names", on="data"),
        Column("mesh", "mesh", RULES, on=EVERYWHERE if len(meshes) > 1 else "data", share="13%"),
        Column("layout", "splits", RULES, share="30%"),
        Column("beside", "storage and recompute", rank=4, beside="layout", under="layout"),
        Column("step_seconds", "step", SECONDS),
        Column(
            "step_over_answer", "ratio", TIMES, 2, under="step_seconds", on="data" if lean else EVERYWHERE
        ),
        Column("compute_seconds", "compute", SECONDS, rank=6, on="terminal, data"),
        Column("exposed_communication_seconds", "exposed", SECONDS, rank=5),
        Column("communication_seconds", "communication", SECONDS, on="data"),
        Column("mfu", "MFU", SHARE, rank=3, on=EVERYWHERE if utilised else "data"),
        Column("peak_memory_bytes", "memory", BYTES),
        Column("memory_over_answer", "ratio", TIMES, 2, on=EVERYWHERE if lean else "data"),
        Column("feasible", "fits", rank=0 if {*said} - {"yes"} else 4),
        Column("reason", "reason", under="feasible", on="page, data"),
    )
    rows = [row(*each, fit) for each, fit in zip(named, said, strict=True)]
    return View(title, columns, rows, name, strong=strong, shown=8)


def frontier(plan: PlanFile, fits: Callable[[Alternative], str] | None = None) -> View:
    """Time against memory, the least memory first; at a knee, more memory begins to buy little time."""
    found = choices.frontier(plan)
    named = [
        (f.choice, f.choice.name, [w for w, on in (("this plan", f.is_answer), ("knee", f.knee)) if on])
        for f in found
    ]
    made = layout_table(
        "Pareto frontier of time and memory",
        "point",
        named,
        plan,
        fits or plan.fit_of,
        name="frontier",
        strong=None,
    )
    marks = (Column("knee", "knee", FLAG, on="data"), Column("this_plan", "this plan", FLAG, on="data"))
    rows = [(*row, f.knee, f.is_answer) for row, f in zip(made.rows, found, strict=True)]
    return replace(made, columns=(*made.columns, *marks), rows=rows)


def repairs(found: Sequence[Repair]) -> View:
    """The repairs where nothing fits, the fastest first, with the command lines."""
    columns = (
        Column("change", "change", lead=True),
        Column("step_seconds", "step", SECONDS),
        Column("mfu", "MFU", SHARE),
        Column("peak_memory_bytes", "memory", BYTES),
        Column("layout", "layout", RULES, on="page, data"),
        Column("beside", "storage and recompute", under="layout", on="page, data"),
        Column("command", "command", share="34%", on="page, data"),
    )
    rows = [
        (
            Cell(
                f"{each.change} ({each.note})" if each.note else each.change, strong=True, value=each.change
            ),
            Cell(sub="" if each.proven else "not proven", value=each.step_seconds),
            each.mfu,
            Cell(used_text(each.peak_memory_bytes, each.memory_bytes), value=each.peak_memory_bytes),
            *(each.layout, each.decided, Cell(code=True, value=each.command)),
        )
        for each in found
    ]
    return View("What would help", columns, rows, shown=12)


def record(pairs: Sequence[tuple[str, str]], title: str) -> View:
    """Names and values."""
    columns = (Column("what", "what", lead=True, share="13em"), Column("value", "value"))
    rows = [(Cell(name, strong=True), Cell(value, code=name in TYPED)) for name, value in pairs if value]
    return View(title, columns, rows, shown=99, fixed=True)
