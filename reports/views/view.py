"""A table as data: typed columns, rows of plain values, and the words around them.

Three renderers take any view: `layoutopt.cli.terminal` for terminals, `reports.page.cells` for pages,
`reports.tables` for frames and CSV files. The kind of a column formats its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layoutopt.plan.units import (
    bytes_text,
    number,
    percent,
    rate_text,
    seconds_text,
    share_text,
    shorten,
    times_text,
)

CellValue = str | float | int | bool | None
EVERYWHERE = "terminal, page, data"
LONGEST = 300
"""Characters of a row in words."""


@dataclass(frozen=True)
class Kind:
    """The kind of a column's values.

    Attributes:
      say: formats a value; None has no text.
      number: set right, and sorted by value.
      adds: rows that are left out may be summed up.
    """

    say: Callable[[Any], str]
    number: bool = True
    adds: bool = False


TEXT = Kind(str, number=False)
SECONDS = Kind(seconds_text, adds=True)
BYTES = Kind(bytes_text, adds=True)
FLOP = Kind(lambda value: rate_text(value, "FLOP"), adds=True)
RUNS = Kind(lambda value: f"{value:,.6g}", adds=True)
SHARE = Kind(lambda value: share_text(value, 1.0), adds=True)
ERROR = Kind(percent)
TIMES = Kind(times_text)
WHOLE = Kind(lambda value: f"{value:,}")
NUMBER = Kind(number)
RULES = Kind(lambda layout: layout.replace(";", "; ") or "nothing is split", number=False)
FLAG = Kind(lambda value: "yes" if value else "no", number=False)


@dataclass(frozen=True)
class AxisTag:
    """A short name on the colour of its mesh axis."""

    text: str
    token: str


@dataclass(frozen=True)
class Cell:
    """A value with words or marks of its own; marks are shown on pages only.

    Attributes:
      text: replaces the formatted value.
      sub: a second, quieter line.
      bars: stretches (share of the column's width, colour) of a small bar under the text.
      fill: a colour for the whole cell; the text is then for people who do not see it.
      piece: parts of width and height of the box that is a whole tensor.
      differs: True if it differs from the first plan.
      state: 'good', 'warn', 'bad' or ''.
      span: columns that it fills.
      code: its text is to be typed.
      value: the plain value, which data have and by which the column is sorted.
      more: lines that are folded; text between backquotes is code.
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
    value: CellValue = None
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
      key: its name in data.
      head: its heading, as terminals write it.
      rank: columns of the highest rank leave a narrow terminal first; 0 stays.
      beside: the column to which a narrow terminal appends these texts.
      under: pages show it as a second line in this column's cells.
      on: the renderers that show it.
      lead: names the row; the first column if none does.
      short: never broken over lines.
      named: its heading is a user's name, which may be long.
      share: its part of a page's table, as '30%'; '' leaves it to the contents.
    """

    key: str
    head: str = ""
    kind: Kind = TEXT
    rank: int = 0
    beside: str = ""
    under: str = ""
    on: str = EVERYWHERE
    lead: bool = False
    short: bool = False
    named: bool = False
    share: str = ""

    def shown_on(self, where: str) -> bool:
        """True if 'terminal', 'page' or 'data' have it."""
        return where in self.on

    def cell(self, found: CellValue | Cell) -> Cell:
        """A row's entry with its words."""
        if not isinstance(found, Cell):
            found = Cell(value=found)
        if found.text or found.value is None:
            return found
        return replace(found, text=self.kind.say(found.value))


def texts(*same: str, **heads: str) -> tuple[Column, ...]:
    """Columns of texts; their headings also name them in data, but for those of `heads`."""
    return tuple(Column(*each) for each in ({n.replace(" ", "_"): n for n in same} | heads).items())


ViewRow = Sequence[CellValue | Cell]


@dataclass(frozen=True)
class View:
    """One table.

    Attributes:
      title: the content of the table.
      name: of its file, without an ending; '': it has none.
      total: the last row is a sum.
      strong: the row that matters most.
      shown: rows that a page does not fold away.
      more: rows that were left out altogether.
      wide: a comparison of plans; on a telephone its rows become blocks with one cell per plan.
      compact: narrow enough to stay a table on a telephone.
      folded: the whole table is folded away under these words.
      fixed: its rows have an order that no reader changes.
    """

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[ViewRow]
    name: str = ""
    total: bool = False
    strong: int | None = None
    shown: int = 10
    more: int = 0
    wide: bool = False
    compact: bool = False
    folded: str = ""
    fixed: bool = False

    def first(self, most: int, words: str = "{} others") -> View:
        """The first rows, and one more row that sums up the others if they can be summed."""
        rest = [[c.value if isinstance(c, Cell) else c for c in row] for row in self.rows[most:]]
        if not rest:
            return self
        lead = next((c for c in self.columns if c.lead), self.columns[0])
        sums: list[CellValue] = []
        for column, values in zip(self.columns, zip(*rest, strict=True), strict=True):
            known = [v for v in values if isinstance(v, int | float)]
            sums.append(sum(known) if column.kind.adds and known else None)
            if column is lead:
                sums[-1] = words.format(len(rest))
        return replace(self, rows=[*self.rows[:most], sums])

    def and_sum(self, *values: CellValue | Cell) -> View:
        """With a last row, their sum."""
        return replace(self, rows=[*self.rows, values], total=True)

    def in_words(self, most: int = 24) -> str:
        """The title and the first rows as sentences, for people who do not see a drawing of them."""
        said, shown = [], any(c.shown_on("page") for c in self.columns)
        for row in self.rows[:most]:
            both = zip(self.columns, row, strict=True)
            cells = ((c.head, c.cell(entry)) for c, entry in both if c.shown_on("page") or not shown)
            pairs = ((head, "; ".join(filter(None, (each.text, each.sub)))) for head, each in cells)
            (_, lead), *rest = (pair for pair in pairs if pair[1])
            said.append(f"{lead}: {', '.join(f'{head} {text}' for head, text in rest)}")
        return f"{self.title}. {'; '.join(shorten(each, LONGEST) for each in said)}."
