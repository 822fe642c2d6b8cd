"""Streams of output: results to stdout, progress and messages to stderr, one JSON object with `--json`.

Colour and width follow the terminal; in a pipe there is no colour, nothing is cut off and no line ends in
spaces. rich obeys NO_COLOR.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from layoutopt.cli.streams import has_unicode
from layoutopt.plan.units import clean
from reports.views.view import Column, View

BETWEEN = 3
"""Characters between two columns."""
INDENT = GAP = 2
ROOMY, WIDE = 20, 36
"""Characters of a longer text before it breaks: columns of rank `EXTRA` and more leave before a text has less
than `WIDE`, others before it has less than `ROOMY`."""
EXTRA = 4


@dataclass
class _Part:
    """A column that is shown, with its texts."""

    column: Column
    texts: list[str]

    @property
    def right(self) -> bool:
        return self.column.kind.number

    @property
    def lines(self) -> list[str]:
        """Its heading first."""
        return [self.column.head, *self.texts]

    def widest(self, most: int = 10**6) -> int:
        """Characters of the longest line; of one that may break, not more than `most` or its longest word."""
        found = max((cell_len(line) for text in self.lines for line in text.split("\n")), default=0)
        return found if self.right else max(min(found, most), self.least)

    @property
    def least(self) -> int:
        """Characters without which a word, or a number with its unit, would break."""
        words = (part for text in self.texts for part in ([text] if self.right else text.split()))
        return max(map(cell_len, (*words, *self.column.head.split())), default=0)


@dataclass
class Sheet:
    """A view as wide as the terminal lets it be."""

    view: View

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        parts = self._parts(room)
        widths = _widths(parts, room)
        if widths is None:
            yield from self._rows_below(parts, room) or self._blocks(parts)
            return
        made = Table(
            title=Text(self.view.title, style="bold"),
            title_justify="left",
            header_style="bold",
            show_edge=False,
            pad_edge=False,
        )
        for part, width in zip(parts, widths, strict=True):
            justify = "right" if part.right else "left"
            made.add_column(Text(part.column.head), justify=justify, overflow="fold", width=width)  # type: ignore[arg-type]
        for n, row in enumerate(zip(*(part.texts for part in parts), strict=True)):
            if self.view.total and n == len(self.view.rows) - 1:
                made.add_section()
            made.add_row(*map(Text, row), style=self._style(n))
        yield made

    def _style(self, row: int) -> str | None:
        return "bold" if row == self.view.strong else None

    def _parts(self, room: int) -> list[_Part]:
        """The columns for which there is room; of those that leave, some go on beside others."""
        cells = [
            [c.cell(entry).text for c, entry in zip(self.view.columns, row, strict=True)]
            for row in self.view.rows
        ]
        texts = [*map(list, zip(*cells, strict=True))] or [[] for _ in self.view.columns]
        parts = [
            _Part(column, column_texts)
            for column, column_texts in zip(self.view.columns, texts, strict=True)
            if column.shown_on("terminal")
        ]
        while True:
            gone = max(reversed(parts), key=lambda part: part.column.rank)
            most = WIDE if gone.column.rank >= EXTRA else ROOMY
            fits = sum(p.widest(most) for p in parts) + BETWEEN * (len(parts) - 1) <= room
            if fits or not gone.column.rank:
                break
            parts.remove(gone)
            for i, p in enumerate(parts if gone.column.beside else []):
                if p.column.key == gone.column.beside:
                    both = zip(p.texts, gone.texts, strict=True)
                    parts[i] = replace(p, texts=["; ".join(filter(None, pair)) for pair in both])
        return parts

    def _rows_below(self, parts: Sequence[_Part], room: int) -> list[RenderableType]:
        """What each row is about, and its other cells in columns below; nothing where that has no room."""
        others = parts[1:]
        wide = [part.widest() for part in others]
        if INDENT + sum(wide) + GAP * (len(wide) - 1) > room:
            return []

        def line(texts: Sequence[str]) -> str:
            cells = (
                text.rjust(width) if part.right else text.ljust(width)
                for part, text, width in zip(others, texts, wide, strict=True)
            )
            return (" " * INDENT + (" " * GAP).join(cells)).rstrip()

        said: list[RenderableType] = [Text(self.view.title, style="bold")]
        said.append(Text(line([part.column.head for part in others]), style="bold"))
        for n, (name, *texts) in enumerate(zip(*(part.texts for part in parts), strict=True)):
            said += [Text(name, style=self._style(n) or ""), Text(line(texts))]
        return said

    def _blocks(self, parts: Sequence[_Part]) -> Iterator[RenderableType]:
        """Each row under what its first column says."""
        yield Text(self.view.title, style="bold")
        heads = [f"{' ' * INDENT}{part.column.head}" for part in parts[1:]]
        for n, (first, *texts) in enumerate(zip(*(part.texts for part in parts), strict=True)):
            yield Text(first, style=self._style(n) or "")
            yield Facts([(name, text) for name, text in zip(heads, texts, strict=True) if text], {})


def _widths(parts: Sequence[_Part], room: int) -> list[int] | None:
    """Characters of every column: all that its texts need, or less of the widest ones, which then break
    between words; None where even that is not enough."""
    wanted, least = [part.widest() for part in parts], [part.least for part in parts]
    free = room - BETWEEN * (len(parts) - 1)
    if sum(least) > free:
        return None
    level = max(wanted, default=0)
    while sum(found := [max(a, min(w, level)) for a, w in zip(least, wanted, strict=True)]) > free:
        level -= 1
    return found


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
            # Layouts and meshes that are too long for a line break between their rules.
            value = " ".join(w.replace(";", "; ") if cell_len(w) > room else w for w in value.split(" "))
            made.add_row(Text(name), Text(value, style=self.styles.get(name, "")))
        yield made


if TYPE_CHECKING:
    from layoutopt.plan.fields import Data
    from mesh_tf_core import Layout

PIPE_WIDTH = 240
GOOD, DOUBT, BAD = "bold green", "bold yellow", "bold red"
FITS = {"yes": GOOD, "barely": DOUBT, "no": BAD}
"""Colours of `layoutopt.plan.known.Known.fits`."""
"""Colours of verdicts, which the words say too."""
PLAIN: Mapping[str, str] = {}


class _Console(Console):
    def render(self, renderable: RenderableType, options: Any = None) -> Iterator[Segment]:
        """Names of files and models must not control the terminal."""
        for each in super().render(renderable, options):
            text = "\n".join(map(clean, each.text.split("\n")))
            yield each if each.control or text == each.text else Segment(text, each.style)

    def on_broken_pipe(self) -> None:
        """A reader that has gone is handled at the door, for all kinds of output alike."""
        raise BrokenPipeError


class Terminal:
    """The two streams of one command.

    Args:
      as_json: print one JSON object and nothing else on stdout.
      quiet: no progress and no messages on stderr.
      shown: False if another process of the job prints the output.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False, shown: bool = True) -> None:
        self.as_json, self.quiet, self.shown = as_json, quiet or not shown, shown
        self.out = _console(sys.stdout)
        self.err = _console(sys.stderr)

    @property
    def live(self) -> bool:
        """True if a moving display makes sense."""
        return self.err.is_terminal and not self.quiet

    def say(self, text: str) -> None:
        """A message, on stderr."""
        if not self.quiet:
            with contextlib.suppress(OSError):  # a message must not keep a result from its place
                self.err.print(Text(text), highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, what: str, said: bool = False) -> Iterator[None]:
        """Shows a message on a terminal while something takes time; elsewhere prints it as one line if it is
        to be `said`."""
        if not self.live:
            if said:
                self.say(what)
            yield
            return
        with self.err.status(Text(what)):
            yield

    def show(self, *parts: RenderableType | View) -> None:
        """Results for people, on stdout; nothing with `--json`."""
        if self.as_json or not self.shown:
            return
        for part in parts:
            drawn = Text(part) if isinstance(part, str) else Sheet(part) if isinstance(part, View) else part
            if self.out.is_terminal:
                self.out.print(drawn, highlight=False)
                continue
            with self.out.capture() as found:
                self.out.print(drawn, highlight=False)
            for line in found.get().splitlines():
                self.out.print(Text(line.rstrip()), highlight=False, soft_wrap=True)

    def show_whole(self, *lines: str) -> None:
        """Lines to be copied, on stdout, which no width breaks."""
        if self.shown and not self.as_json:
            for line in lines:
                self.out.print(Text(line), highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def saved(self, out: Path | None, save: Callable[[Path], object], what: str) -> Iterator[bool]:
        """Writes a requested file before the output inside the block, whose reader may leave; a failure is
        raised after the output. Gives whether it was written."""
        from mesh_tf_core.errors import UserError

        failed, out = None, out if self.shown else None
        if out is not None:
            try:
                save(out)
            except UserError as error:
                failed = error
        yield out is not None and failed is None
        if failed is not None:
            raise failed
        if out is not None:
            self.say(f"wrote {what} to {out}")

    def result(self, data: Data) -> None:
        """The result for programs; nothing without `--json`."""
        if self.shown and self.as_json:
            out = self.out.file  # while a thread still runs the user's code, `sys.stdout` is its stderr
            ascii = not has_unicode(out)
            out.write(json.dumps(plain(data), indent=2, allow_nan=False, ensure_ascii=ascii) + "\n")


def _console(stream: IO[str]) -> Console:
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(file=stream, width=wide, markup=False, emoji=False)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def facts(rows: Iterable[tuple[str, str]], verdicts: Mapping[str, str] = PLAIN) -> Facts:
    """Names and values, without lines.

    Args:
      verdicts: name to `GOOD`, `DOUBT` or `BAD`, the colour of its value.
    """
    return Facts(tuple(rows), verdicts)


def layout_text(layout: Layout) -> str:
    """A layout for people."""
    return str(layout) or "replicated (nothing is split)"
