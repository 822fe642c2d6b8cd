"""What readers open or move: operations with what is behind them, sliders over what was searched."""

from __future__ import annotations

import math
from collections.abc import Mapping

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import (
    against,
    count,
    digits,
    flops,
    memory,
    percent,
    plural,
    seconds,
    shorten,
)
from reports.figures.tradeoffs import FACTORS, factor_value, layout_letters
from reports.page.cells import Cell, Column, Control, PageTable
from reports.views.work import Work, work

LONGEST = 400
"""Characters of a layout."""


def operations(plan: PlanFile) -> PageTable:
    """Operations by what they add to the step, with the collectives that each causes."""
    found = [w for w in work(plan) if w.seconds > 0]
    longest = found[0].seconds if found else 1.0
    total = plan.predicted.step_seconds or sum(w.seconds for w in found) or 1.0
    rows = [_operation(w, longest, total, plan.details.sources) for w in found[:60]]
    head = (
        Column("Operation", lead=True, share="28%"),
        Column("Adds to the step", True),
        Column("Work"),
        Column("Collectives"),
    )
    return PageTable(
        "Most expensive operations",
        head,
        rows,
        shown=12,
        more=len(found) - len(rows),
        more_in="operations.csv",
    )


def _opened(w: Work, sources: Mapping[str, str]) -> tuple[str, ...]:
    """What is folded away under an operation: where the model writes it, and its work."""
    code = sources.get(w.place, "").replace("`", "'")
    found = [f"{w.place}: `{code}`" if code else w.place] if w.place else []
    found.append(f"compute {seconds(w.compute)}, exposed {seconds(w.exposed)}, hidden {seconds(w.hidden)}")
    if w.flops or w.bytes:
        intensity = f", {digits(w.flops / w.bytes)} FLOP a byte" if w.flops and w.bytes else ""
        found.append(f"{flops(w.flops)} and {memory(w.bytes)} read or written{intensity}")
    return tuple(found)


def _operation(w: Work, longest: float, total: float, sources: Mapping[str, str]) -> list[Cell]:
    said = [
        f"{c.name}: {memory(c.sent)} in {plural(round(c.runs), 'run')}, {seconds(c.exposed)} exposed of "
        f"{seconds(c.seconds)}"
        for c in w.collectives.values()
    ]
    runs = f"{count(w.runs)} runs" if w.runs > 1 else ""
    busy = ", ".join(x for x in (runs, flops(w.flops) if w.flops else "") if x)
    bars = ((w.compute / longest, "compute"), (w.exposed / longest, "exposed"))
    return [
        Cell(w.name, w.phase, strong=True, more=_opened(w, sources)),
        Cell(seconds(w.seconds), percent(w.seconds / total), bars=bars, value=w.seconds),
        Cell(busy or "–"),
        Cell("; ".join(said) or "–"),
    ]


def controls(plan: PlanFile, name: str) -> tuple[Control, ...]:
    """A slider for every factor that was searched: the best step and its layout at each value."""
    letters, now = layout_letters(plan), plan.predicted.step_seconds
    found = []
    for n, one in enumerate(plan.details.sensitivity):
        said = []
        for t in one.trials:
            words = "nothing fits" if t.proven else "unknown"
            if t.step_seconds is not None:
                words = f"{seconds(t.step_seconds)} a step ({against(t.step_seconds, now)})"
                if t.layout:
                    shown = shorten(t.layout.replace(";", "; "), LONGEST)
                    words += f", best by {letters[t.layout]}: {shown}"
            said.append(f"{factor_value(one.factor, t.value)}: {words}")
        far = [abs((t.step_seconds or math.inf) - now) for t in one.trials]
        start = far.index(min(far)) if far else 0  # where the step is the plan's own
        if len(said) > 1:
            words = FACTORS.get(one.factor, shorten(one.factor, 30))
            found.append(Control(f"{name}-if{n}", f"If {words} were", tuple(said), start))
    return tuple(found)
