"""The parts of a page: views as tables of cells, panels with a figure, sections."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from layoutopt.plan.units import shorten
from reports.views.view import Cell, Column, View

_LEADS = resources.files("reports").joinpath("templates/leads.json").read_text(encoding="utf-8")
LEADS: Mapping[str, Mapping[str, str]] = json.loads(_LEADS)
"""How to read each section, in a sentence or two, by page and section."""
MOST = 300
"""Rows of a table on the page; the CSV files have them all."""
LONGEST = 400
"""Length of a text beside others; the plan's own layout is written in full at the end."""


@dataclass(frozen=True)
class PageTable:
    """A view as a page shows it; rows after `view.shown` are folded."""

    view: View
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]

    @property
    def more(self) -> int:
        """Rows that are left out."""
        return len(self.view.rows) - len(self.rows)

    @property
    def sorts(self) -> bool:
        """True if readers may sort it by its columns."""
        return not (self.view.fixed or self.view.wide) and len(self.rows) > 2

    @property
    def style(self) -> str:
        return "wide" if self.view.wide else "compact" if self.view.compact else "rows"

    @property
    def first(self) -> Sequence[Sequence[Cell]]:
        if self.view.folded:
            return ()
        shown = self.view.shown
        return self.rows if len(self.rows) <= shown + 2 else self.rows[:shown]

    @property
    def rest(self) -> Sequence[Sequence[Cell]]:
        return self.rows[len(self.first) :]


def grid(view: View, longest: int = LONGEST) -> PageTable:
    """A view for a page: some columns are placed under others, and headings begin with a capital letter."""
    shown = [(i, c) for i, c in enumerate(view.columns) if c.shown_on("page")]
    over = {c.key: [(i, u) for i, u in shown if u.under == c.key] for _, c in shown if not c.under}

    def cell(row: Sequence[object], n: int, i: int, column: Column) -> Cell:
        made = column.cell(row[i])  # type: ignore[arg-type]
        under = (u.cell(row[j]).text for j, u in over[column.key])  # type: ignore[arg-type]
        text = made.text if made.code else shorten(made.text, longest)
        if text == "+".join(chip.text for chip in made.chips):
            text = ""  # its chips are read
        blank = not (text or made.chips or made.piece or made.fill or made.sub or column.named)
        return replace(
            made,
            text="–" if blank else text,
            sub=shorten("; ".join(filter(None, (made.sub, *under))), longest),
            strong=made.strong or (n == view.strong and column.lead),
        )

    columns = [(i, c) for i, c in shown if not c.under]
    rows = [[cell(row, n, i, c) for i, c in columns] for n, row in enumerate(view.rows[:MOST])]
    if view.wide:
        rows = [*map(_merged, rows)]
    heads = (replace(c, head=c.head if c.named else f"{c.head[:1].upper()}{c.head[1:]}") for _, c in columns)
    return PageTable(view, tuple(heads), rows)


def _merged(cells: list[Cell]) -> list[Cell]:
    """What is the same in all plans is said once."""
    if any(c.differs for c in cells) or len(cells) < 3:
        return cells
    return [cells[0], replace(cells[1], span=len(cells) - 1)]


@dataclass(frozen=True)
class Control:
    """A slider over results of searches in which one factor changes.

    Attributes:
      trials: the text at each position.
      start: the position of the present state.
    """

    id: str
    words: str
    trials: tuple[str, ...]
    start: int


@dataclass(frozen=True)
class PageBlock:
    """One figure or table (or both) of one plan.

    Attributes:
      finding: the finding, as a heading.
      svg: safe markup made by `reports.svg`.
      missing: the command that adds the data.
      notes: short remarks below.
      controls: sliders above the table.
    """

    finding: str = ""
    svg: str = ""
    grid: PageTable | None = None
    missing: str = ""
    notes: tuple[str, ...] = ()
    controls: tuple[Control, ...] = ()


@dataclass(frozen=True)
class Panel:
    """A plan's blocks in one section; `letter` is empty when there is one plan only."""

    letter: str
    name: str
    blocks: tuple[PageBlock, ...]


@dataclass(frozen=True)
class Section:
    """One part of the page; `lead` explains how to read it, `missing` names the command that adds it."""

    id: str
    title: str
    lead: str
    panels: tuple[Panel, ...] = ()
    shared: tuple[PageBlock, ...] = ()
    missing: str = ""
