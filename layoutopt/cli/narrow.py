"""Tables that stay readable on narrow terminals: no word is broken. Where there is no room for that, what a
row is about stands on a line of its own over its cells; else every row is a block of names and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

BETWEEN = 3
"""Characters between two columns."""
INDENT = GAP = 2


class Sheet(Table):
    """A table of texts as wide as the terminal lets it be."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        if widths is None:
            yield from self._rows_below(options.max_width) or self._blocks()
            return
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _texts(self) -> list[list[str]]:
        """The lines of each column, its name first."""
        return [[str(column.header), *map(str, column.cells)] for column in self.columns]

    def _widths(self, room: int) -> list[int] | None:
        """Characters of every column: all that its texts need, or less of the widest ones, which then break
        between words; None where even that is not enough."""
        texts = self._texts()
        wanted = [max(cell_len(line) for text in column for line in text.split("\n")) for column in texts]
        least = [
            max(
                (cell_len(part) for n, text in enumerate(lines) for part in self._parts(column, text, n)),
                default=0,
            )
            for column, lines in zip(self.columns, texts, strict=True)
        ]
        free = room - BETWEEN * (len(texts) - 1)
        if sum(least) > free:
            return None
        level = max(wanted, default=0)
        while sum(found := [max(a, min(w, level)) for a, w in zip(least, wanted, strict=True)]) > free:
            level -= 1
        return found

    @staticmethod
    def _parts(column: Column, text: str, row: int) -> list[str]:
        """What of a cell stays on one line: its words, a number with its unit."""
        return [text] if row and column.justify == "right" else text.split()

    def _rows_below(self, room: int) -> list[RenderableType]:
        """What each row is about, and its other cells in columns below; nothing where that has no room."""
        _, *texts = self._texts()
        wide = [max(map(cell_len, column)) for column in texts]
        if INDENT + sum(wide) + GAP * (len(wide) - 1) > room:
            return []

        def line(n: int) -> str:
            cells = [
                text[n].rjust(width) if column.justify == "right" else text[n].ljust(width)
                for column, text, width in zip(self.columns[1:], texts, wide, strict=True)
            ]
            return " " * INDENT + (" " * GAP).join(cells).rstrip()

        said: list[RenderableType] = [Text.assemble(self.title)] if self.title else []
        said.append(Text(line(0), style="bold"))
        for n, (row, name) in enumerate(zip(self.rows, self._texts()[0][1:], strict=True), start=1):
            said += [Text(name, style="bold" if row.style else ""), Text(line(n))]
        return said

    def _blocks(self) -> Iterator[RenderableType]:
        """Each row under what its first column says."""
        if self.title:
            yield Text.assemble(self.title)
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        heads = [str(column.header) for column in self.columns[1:]]
        for row, (first, *cells) in zip(self.rows, rows, strict=True):
            yield Text(str(first), style="bold" if row.style else "")
            said = [(f"{' ' * INDENT}{n}", str(c)) for n, c in zip(heads, cells, strict=True) if str(c)]
            yield Facts(said, {})


@dataclass(frozen=True)
class Facts:
    """Names and values; a layout that is longer than a line breaks between its rules.

    Attributes:
      styles: of the values of some names.
    """

    rows: Sequence[tuple[str, str]]
    styles: Mapping[str, str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        made = Table.grid(padding=(0, GAP))
        made.add_column(style="dim", no_wrap=True)
        made.add_column(overflow="fold")
        room = options.max_width - GAP - max((cell_len(name) for name, _ in self.rows), default=0)
        for name, value in self.rows:
            made.add_row(Text(name), Text(_breakable(value, room), style=self.styles.get(name, "")))
        yield made


def _breakable(text: str, room: int) -> str:
    """With room to break it between the rules of layouts and meshes that are too long for a line."""
    return " ".join(w.replace(";", "; ") if cell_len(w) > room else w for w in text.split(" "))
