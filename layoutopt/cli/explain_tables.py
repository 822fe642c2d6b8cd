"""What a plan's decisions are worth, as tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.table import Table

from layoutopt.cli.plan_tables import Fits, rules_text
from layoutopt.cli.results import layout_text
from layoutopt.cli.terminal import Terminal, table
from layoutopt.plan.units import bytes_text, seconds_text, share_text

if TYPE_CHECKING:
    from layoutopt.analysis.explain import Difference, WhatIfAnswer
    from layoutopt.analysis.keeping import Keeping
    from layoutopt.evaluator import Evaluation

MOST = 15
"""Rows of numbers that differ."""


def rules_text_of(layout: str) -> str:
    """A layout's string with room to break the line."""
    return layout.replace(";", "; ") or rules_text({})


def worth_table(
    title: str, evaluation: Evaluation, memory: bool, answers: list[WhatIfAnswer], best: str
) -> Table:
    """What the step, or the memory, comes to under each condition, the dearest first.

    Args:
      memory: whether bytes are compared, not seconds.
      best: which condition, e.g. "without it".
    """
    now = evaluation.memory.peak if memory else evaluation.cost.step_seconds
    text: Callable[[float], str] = bytes_text if memory else seconds_text
    columns = (
        "rule",
        f"{'least memory' if memory else 'best step'} {best}",
        "costs",
        "then the layout is",
        "proven",
    )
    rows: list[tuple[str, ...]] = []
    found = [(a, a.peak if memory else a.seconds) for a in answers]
    for a, value in sorted(found, key=lambda pair: -(math.inf if pair[1] is None else pair[1])):
        if value is None:
            rows.append(
                (
                    a.condition,
                    "nothing fits" if a.proven else "unknown",
                    "",
                    a.reason,
                    "yes" if a.proven else "no",
                )
            )
            continue
        extra, most = max(value - now, 0), "" if a.proven else "at most "
        costs = f"{most}{text(extra)} ({share_text(extra, now)})"
        proven = "yes" if a.proven else "no"
        rows.append((a.condition, f"{most}{text(value)}", costs, rules_text_of(a.layout), proven))
    return table(title, columns, rows, (1, 2))


def kept_table(evaluation: Evaluation, fits: Fits, found: list[Keeping]) -> Table:
    """What the step comes to if recomputed loops keep more, or less."""
    step = evaluation.cost.step_seconds
    rows = [
        (
            k.dim,
            k.change,
            seconds_text(k.seconds),
            _signed(k.seconds - step),
            bytes_text(k.peak),
            fits(k.peak),
        )
        for k in found
    ]
    columns = ("loop", "keeps", "step", "more", "memory", "fits")
    return table("What layers keep when they run again", columns, rows, (2, 3, 4))


def show_against(
    terminal: Terminal, evaluation: Evaluation, other: Evaluation, rows: list[Difference]
) -> None:
    """Prints where another layout's step differs from the plan's."""
    ours, theirs = evaluation.cost.step_seconds, other.cost.step_seconds
    cells = [
        (
            f"{d.scope}/{d.name}" if d.scope else d.name,
            d.phase,
            d.where or "compute",
            seconds_text(d.ours),
            seconds_text(d.theirs),
            _signed(d.saved),
        )
        for d in rows[:MOST]
    ]
    rest = sum(d.saved for d in rows[MOST:])
    if len(rows) > MOST:
        cells.append((f"{len(rows) - MOST} others", "", "", "", "", _signed(rest)))
    cells.append(("step", "", "", seconds_text(ours), seconds_text(theirs), _signed(theirs - ours)))
    columns = ("operation", "phase", "on", "the plan", "the other", "saved")
    terminal.show("", table("Where the two differ", columns, cells, (3, 4, 5), total=True))
    terminal.show(
        f"{layout_text(other.layout)}: {seconds_text(theirs)} a step, "
        f"{bytes_text(other.memory.peak)} of memory; the plan: {bytes_text(evaluation.memory.peak)}"
    )


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-' if seconds < 0 else ''}{seconds_text(abs(seconds))}"
