"""What a page is made of: tables of cells, panels with a figure, sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.theme import axis_token


@dataclass(frozen=True)
class AxisTag:
    """A short name on the colour of its mesh axis."""

    text: str
    token: str


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
      sub: a second, quieter line.
      bars: stretches (share of the column's width, colour) of a small bar under the text.
      fill: a colour for the whole cell; the text is then for people who do not see it.
      piece: parts of width and height of the box that is a whole tensor.
      differs: it is not what the first plan has.
      state: 'good', 'warn', 'bad' or ''.
      span: columns that it fills.
      code: its text is to be typed.
      value: the number behind the text, by which the column is sorted.
      more: lines that are folded away; between backquotes stands code.
    """

    text: str = ""
    sub: str = ""
    chips: tuple[AxisTag, ...] = ()
    bars: tuple[tuple[float, str], ...] = ()
    fill: str = ""
    piece: tuple[float, float] | None = None
    strong: bool = False
    differs: bool = False
    state: str = ""
    span: int = 1
    code: bool = False
    value: float | None = None
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
      number: holds numbers, set right.
      lead: names the row.
      short: never broken over lines.
      share: its part of the table's width, as '30%'; '' leaves it to the contents.
      named: its heading is a user's name, which may be long.
    """

    name: str
    number: bool = False
    lead: bool = False
    short: bool = False
    named: bool = False
    share: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table; rows after `shown` are folded away until they are asked for.

    Attributes:
      caption: what the table lists, for people who do not see it.
      more: rows that were left out altogether, because no one reads that far.
      wide: a comparison of plans, whose rows become blocks of one cell per plan on a telephone.
      compact: narrow enough to stay a table on a telephone.
      folded: the whole table is folded away under these words.
      fixed: its rows have an order that no reader changes.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Cell]]
    shown: int = 10
    more: int = 0
    more_in: str = ""
    wide: bool = False
    compact: bool = False
    folded: str = ""
    fixed: bool = False

    @property
    def sorts(self) -> bool:
        """Whether readers may sort it by its columns."""
        return not (self.fixed or self.wide) and len(self.rows) > 2

    @property
    def style(self) -> str:
        return "wide" if self.wide else "compact" if self.compact else "rows"

    @property
    def first(self) -> Sequence[Sequence[Cell]]:
        if self.folded:
            return ()
        return self.rows if len(self.rows) <= self.shown + 2 else self.rows[: self.shown]

    @property
    def rest(self) -> Sequence[Sequence[Cell]]:
        return self.rows[len(self.first) :]


@dataclass(frozen=True)
class Control:
    """A slider over what was searched as one factor changes.

    Attributes:
      trials: what is said at each place of it.
      start: the place of things as they are.
    """

    id: str
    words: str
    trials: tuple[str, ...]
    start: int


@dataclass(frozen=True)
class PageBlock:
    """One figure or table (or both) of one plan.

    Attributes:
      finding: what it says, as a heading.
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
    """One part of the page; `lead` says how to read it, `missing` what would add it where it is not there."""

    id: str
    title: str
    lead: str
    panels: tuple[Panel, ...] = ()
    shared: tuple[PageBlock, ...] = ()
    missing: str = ""


def chips(axes: Sequence[str], mesh: Sequence[str]) -> tuple[AxisTag, ...]:
    """Axes in their colours; an axis that the mesh lacks (an alternative's own) is colourless."""
    return tuple(AxisTag(a, axis_token(a, mesh) if a in mesh else "muted") for a in axes)
