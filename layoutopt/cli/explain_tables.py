"""Tables of what a plan's decisions are worth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from layoutopt.cli.plan_tables import Fits, rules_text
from layoutopt.cli.results import layout_text
from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import bytes_text, seconds_text, share_text
from reports.views.view import BYTES, FLAG, SECONDS, Cell, Column, Kind, View, ViewRow

if TYPE_CHECKING:
    from layoutopt.analysis.explain import Difference, WhatIfAnswer
    from layoutopt.analysis.keeping import Keeping
    from layoutopt.optimize.evaluator import Evaluation

MORE = Kind(
    lambda value: f"{'+' if value > 0 else '-' if value < 0 else ''}{seconds_text(abs(value))}", adds=True
)
"""Seconds more, or less."""
MOST = 15
"""Rows of numbers that differ."""


def rules_text_of(layout: str) -> str:
    """A layout's string with room to break the line."""
    return layout.replace(";", "; ") or rules_text({})


def worth_table(
    title: str, evaluation: Evaluation, memory: bool, answers: list[WhatIfAnswer], best: str
) -> View:
    """The table of the step, or the memory, under each condition, the most costly first.

    Args:
      memory: whether bytes are compared, not seconds.
      best: which condition, e.g. "without it".
    """
    now = evaluation.memory.peak if memory else evaluation.cost.step_seconds
    kind = BYTES if memory else SECONDS
    columns = (
        Column("rule", "rule"),
        Column("best", f"{'least memory' if memory else 'best step'} {best}", kind),
        Column("costs", "costs", kind),
        Column("layout", "then the layout is", rank=1),
        Column("proven", "proven", FLAG),
    )

    def row(a: WhatIfAnswer, value: float | None) -> ViewRow:
        if value is None:
            return a.condition, Cell("nothing fits" if a.proven else "unknown"), None, a.reason, a.proven
        extra, most = max(value - now, 0), "" if a.proven else "at most "
        found = Cell(f"{most}{kind.say(value)}", value=value)
        costs = Cell(f"{most}{kind.say(extra)} ({share_text(extra, now)})", value=extra)
        return a.condition, found, costs, rules_text_of(a.layout), a.proven

    found = [(a, a.peak if memory else a.seconds) for a in answers]
    found.sort(key=lambda pair: -(math.inf if pair[1] is None else pair[1]))
    return View(title, columns, [row(a, value) for a, value in found])


def kept_table(evaluation: Evaluation, fits: Fits, found: list[Keeping]) -> View:
    """The table of the step if recomputed loops keep more, or less."""
    step = evaluation.cost.step_seconds
    columns = (
        Column("loop", "loop"),
        Column("change", "keeps"),
        Column("step_seconds", "step", SECONDS),
        Column("more_seconds", "more", MORE),
        Column("peak_bytes", "memory", BYTES),
        Column("fits", "fits"),
    )
    rows = [(k.dim, k.change, k.seconds, k.seconds - step, k.peak, fits(k.peak)) for k in found]
    return View("Saved values of recomputed layers", columns, rows)


def show_against(
    terminal: Terminal, evaluation: Evaluation, other: Evaluation, rows: list[Difference]
) -> None:
    """Prints where another layout's step differs from the plan's."""
    ours, theirs = evaluation.cost.step_seconds, other.cost.step_seconds
    columns = (
        Column("operation", "operation"),
        Column("phase", "phase"),
        Column("axes", "on"),
        Column("plan_seconds", "the plan", SECONDS),
        Column("other_seconds", "the other", SECONDS),
        Column("saved_seconds", "saved", MORE),
    )
    cells = [
        ("/".join(filter(None, (d.scope, d.name))), d.phase, d.where or "compute", d.ours, d.theirs, d.saved)
        for d in rows
    ]
    made = View("Where the two differ", columns, cells).first(MOST)
    terminal.show("", made.and_sum("step", None, None, ours, theirs, theirs - ours))
    terminal.show(
        f"{layout_text(other.layout)}: {seconds_text(theirs)} a step, "
        f"{bytes_text(other.memory.peak)} of memory; the plan: {bytes_text(evaluation.memory.peak)}"
    )
