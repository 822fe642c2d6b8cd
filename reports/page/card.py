"""A plan's first screen as a piece of a notebook: no style sheet, the notebook's own colours."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Any

from layoutopt.plan.units import shorten
from reports.page.answers import answers, axis_uses, run, subject
from reports.page.cells import grid
from reports.reader import plan_of
from reports.views.layouts import layouts

MOST = 8
"""Number of layouts beside the answer."""
LINE = "text-align:left;padding:2px 12px 2px 0;vertical-align:top"


def card_html(plan: Any) -> str:
    """The answer in short: splits, speed, memory, accuracy, proof; then the alternatives."""
    found = plan_of(plan)
    facts = [
        (
            f"{use.chip.text} {use.size}",
            f"splits {use.dims or 'nothing'}{f' ({use.form})' if use.form else ''}",
        )
        for use in axis_uses(found)
    ]
    facts += [(a.question, f"{a.value}: {a.note}") for a in (*answers(found), *run(found))]
    shown = grid(replace(made := layouts(found), rows=made.rows[: MOST + 1]), 160)
    rows = [tuple("; ".join(filter(None, (c.text, c.sub))) for c in row) for row in shown.rows]
    head = tuple(column.head for column in shown.columns)
    return (
        f"<div><b>{escape(shorten(found.model.name, 80))}</b>, {escape(subject(found))}"
        f"<table>{''.join(_row(row) for row in facts)}</table>"
        f"<table>{_row(head, 'th')}{''.join(_row(row) for row in rows)}</table></div>"
    )


def _row(cells: tuple[str, ...], tag: str = "td") -> str:
    inside = "".join(f'<{tag} style="{LINE}">{escape(cell)}</{tag}>' for cell in cells)
    return f"<tr>{inside}</tr>"
