"""Horizontal bars with their names above them: names of any length fit, and so do bars on a telephone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from layoutopt.plan.units import shorten
from reports.figures.sheet import BODY, KEY_ROW, MARGIN, SMALL, WIDTH, FigureSheet, key_rows, text_width

ROW = 42.0
THICK = 13.0


@dataclass(frozen=True)
class BarSegment:
    """A segment of a bar: its length in the data's unit, its colour and its label."""

    size: float
    token: str
    tip: str = ""


@dataclass(frozen=True)
class Bar:
    """One row.

    Attributes:
      value: in words, right above the bar's end of the row.
      note: text beside the name, in the colour `note_token`.
      faint: drawn hatched, because the row is no possible choice.
      limit: a value that this bar alone is held against.
    """

    name: str
    value: str
    parts: tuple[BarSegment, ...] = ()
    note: str = ""
    note_token: str = "muted"
    bold: bool = False
    faint: bool = False
    limit: float | None = None

    @property
    def total(self) -> float:
        return sum(p.size for p in self.parts)


@dataclass(frozen=True)
class Bars:
    """All rows on one scale, which ends at `high`: longer bars are cut and marked with an arrow.

    Attributes:
      limit: a value that all bars are held against, with its words.
    """

    rows: Sequence[Bar]
    high: float
    limit: tuple[float, str] | None = None
    key: Sequence[tuple[str, str]] = field(default=())

    def draw(self, title: str = "") -> FigureSheet:
        """Draws these bars on a new sheet."""
        limit_room = 18.0 if self.limit else 0.0
        keys = len(key_rows(self.key)) * KEY_ROW + (6.0 if self.key else 0.0)
        sheet = FigureSheet(keys + limit_room + ROW * len(self.rows) + 2, title)
        y = 0.0
        if self.key:
            sheet.key(12, self.key)
            y = keys
        top = y + limit_room
        for position, row in enumerate(self.rows):
            self._row(sheet, top + ROW * position, row)
            if row.limit is not None:
                self._mark(sheet, self._x(row.limit), top + ROW * position + 18)
        if self.limit:
            self._limit(sheet, y, top)
        return sheet

    def _x(self, value: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * min(value / self.high if self.high > 0 else 0.0, 1.0)

    def _row(self, sheet: FigureSheet, top: float, row: Bar) -> None:
        room = WIDTH - 12 - text_width(row.value, BODY)
        note = shorten(row.note, 24)
        room -= text_width(note, SMALL) + 8 if note else 0
        name = shorten(row.name, max(8, int(room / (0.61 * BODY))))
        sheet.text(MARGIN, top + 12, name, bold=row.bold, token="muted" if row.faint else "ink")
        if note:
            end = WIDTH - MARGIN - text_width(row.value, BODY) - 8 if row.value else WIDTH - MARGIN
            sheet.text(end, top + 12, note, row.note_token, SMALL, "right")
        sheet.text(WIDTH - MARGIN, top + 12, row.value, align="right", bold=row.bold)
        start, y = 0.0, top + 18
        sheet.rect(MARGIN, y + THICK, WIDTH - 2 * MARGIN, 0.75, "grid")
        for part in row.parts:
            left, right = self._x(start), self._x(start + part.size)
            if right > left:
                width, hatch = max(right - left - 0.75, 0.5), "////" if row.faint else ""
                tip = f"{shorten(row.name, 60)}: {part.tip}" if part.tip else ""
                sheet.rect(left, y, width, THICK, part.token, hatch, tip)
            start += part.size
        if start > self.high * 1.001:
            end = WIDTH - MARGIN
            for shift in (14, 8):
                sheet.line(
                    [(end - shift, y - 1), (end - shift + 5, y + THICK / 2), (end - shift, y + THICK + 1)],
                    "page",
                    2,
                )

    @staticmethod
    def _mark(sheet: FigureSheet, x: float, bar: float) -> None:
        """A limit across a bar."""
        sheet.line([(x, bar), (x, bar + THICK)], "page", 4.5)
        sheet.line([(x, bar - 3), (x, bar + THICK + 3)], "bad", 1.75)

    def _limit(self, sheet: FigureSheet, y: float, top: float) -> None:
        value, words = self.limit or (0.0, "")
        x = self._x(value)
        for position in range(len(self.rows) if value <= self.high else 0):
            self._mark(sheet, x, top + ROW * position + 18)
        width = text_width(words, SMALL)
        align, at = ("right", x) if x > width else ("left", x)
        sheet.text(at, y + 11, words, "bad", SMALL, align)


def cut_scale(values: Sequence[float], answer: float, most: float = 6.0) -> float:
    """The end of a common scale: at the largest value, but not so far out that the answer's bar is a dot."""
    high = max([*values, answer], default=1.0) or 1.0
    return min(high, answer * most) if answer > 0 else high
