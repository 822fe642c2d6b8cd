"""A matplotlib figure that is drawn on in pixels from its top left corner, with real axes for data.

One pixel is one point of the figure. A width of 400 fits a telephone, and fonts have their nominal size.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reports.theme import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 400.0
BODY = 12.0
SMALL = 11.0
MARGIN = 2.0
"""Room at the edges, so that a stroke of the outermost mark is whole."""
KEY_ROW = 17.0
"""Height of a row of keys."""
SETTINGS = {
    "font.family": ["DejaVu Sans"],
    "svg.fonttype": "none",
    "svg.hashsalt": "layoutopt",
    "pdf.fonttype": 42,
    "hatch.linewidth": 1.4,
    "axes.unicode_minus": True,
    "path.simplify": False,
    "text.usetex": False,
    "axes.formatter.use_mathtext": False,
}


@contextmanager
def settings() -> Iterator[None]:
    """Our matplotlib settings while a figure is drawn or saved; letters that a font lacks are no news."""
    import warnings

    import matplotlib

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def text_width(text: str, size: float = BODY) -> float:
    """An upper estimate of a text's width in pixels, for the widest font that a page may choose."""
    wide = sum(1 for c in text if ord(c) > 0x2E80)
    return size * (0.61 * (len(text) - wide) + 1.05 * wide)


@dataclass(frozen=True)
class Tips:
    """The text of the marks of one artist; `near`: of the nearest one, wherever the pointer is."""

    texts: tuple[str, ...]
    near: bool = False


class FigureSheet:
    """A figure of `WIDTH` × `height` pixels; y grows downwards. A title adds room above y = 0."""

    def __init__(self, height: float, title: str = "") -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        lines = textwrap.wrap(title, 47)
        self.head = 17.0 * len(lines) + 12.0 if lines else 0.0
        self.height = height
        self.figure: Figure = Figure(figsize=(WIDTH / 72, (height + self.head) / 72), facecolor=LIGHT["page"])
        FigureCanvasAgg(self.figure)
        self.tips: dict[str, Tips] = {}
        vars(self.figure)["tips"] = self.tips  # for `reports.svg`
        self.plane: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.plane.set_axis_off()
        self.plane.set_xlim(0, WIDTH)
        self.plane.set_ylim(height, -self.head)
        for position, line in enumerate(lines):
            self.text(MARGIN, 17.0 * (position + 1) - 3 - self.head, line, size=13, bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        token: str = "ink",
        size: float = BODY,
        align: str = "left",
        bold: bool = False,
    ) -> None:
        """A text on its baseline; `align` names the end of the text that is at x."""
        self.plane.text(x, y, text, clip_on=False, **_letters(token, size, align, bold))

    def tip(self, artist: Any, *texts: str, near: bool = False) -> None:
        """The text that pages show for a mark under the pointer, or for each of a line's; `near`: for the
        nearest one anywhere over the figure."""
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = Tips(texts, near)

    def rects(
        self, boxes: Iterable[tuple[float, float, float, float]], token: str, hatch: str = "", tip: str = ""
    ) -> None:
        """Filled boxes (left, top, width, height), one path for all of them."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        points: list[tuple[float, float]] = []
        codes: list[Any] = []
        for x, y, w, h in boxes:
            points += [(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)]
            codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
        if points:
            patch = PathPatch(Path(points, codes), facecolor=LIGHT[token], linewidth=0, clip_on=False)
            if hatch:
                patch.set(hatch=hatch, edgecolor=LIGHT["page"])
            self.plane.add_patch(patch)
            if tip:
                self.tip(patch, tip)

    def rect(
        self, x: float, y: float, width: float, height: float, token: str, hatch: str = "", tip: str = ""
    ) -> None:
        """One filled box."""
        self.rects([(x, y, width, height)], token, hatch, tip)

    def frame(
        self, x: float, y: float, width: float, height: float, token: str, thickness: float = 1.0
    ) -> None:
        """The outline of a box."""
        self.line(
            [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)], token, thickness
        )

    def line(
        self, points: Sequence[tuple[float, float]], token: str, thickness: float = 1.0, dashed: bool = False
    ) -> None:
        """A line through points."""
        self.plane.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=LIGHT[token],
            linewidth=thickness,
            linestyle=(0, (4, 3)) if dashed else "-",
            solid_capstyle="butt",
            clip_on=False,
        )

    def key(self, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Rows of colour keys (token, words) from y on."""
        for row, keys in enumerate(key_rows(entries)):
            for x, token, words in keys:
                self.rect(x, y + KEY_ROW * row - 9, 10, 10, token)
                self.text(x + 15, y + KEY_ROW * row, words, "muted", SMALL)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes for data at a place in pixels: no box, a light grid to be set with `ticks`."""
        total = self.height + self.head
        bottom = (total - self.head - y - height) / total
        ax = self.figure.add_axes((x / WIDTH, bottom, width / WIDTH, height / total))
        ax.patch.set_visible(False)
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        ax.spines["bottom"].set(color=LIGHT["rule"], linewidth=1.0)
        return ax


def _letters(token: str, size: float, align: str, bold: bool) -> dict[str, Any]:
    """How a text is written, as arguments of matplotlib."""
    weight = "bold" if bold else "normal"
    style = {"color": LIGHT[token], "fontsize": size, "fontweight": weight}
    return {**style, "ha": align, "va": "baseline", "parse_math": False}


def key_rows(entries: Sequence[tuple[str, str]]) -> list[list[tuple[float, str, str]]]:
    """Colour keys (token, words) in rows as wide as the figure: the x of each, and it."""
    rows: list[list[tuple[float, str, str]]] = []
    x = WIDTH
    for token, words in entries:
        width = 16 + text_width(words, SMALL)
        if not rows or x + width > WIDTH:
            rows.append([])
            x = MARGIN
        rows[-1].append((x, token, words))
        x += width + 10
    return rows


def ticks(
    ax: Axes, axis: Literal["x", "y"], values: Sequence[float], labels: Sequence[str], grid: bool = True
) -> None:
    """Exactly these ticks on axis 'x' or 'y', with a light line at each."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    which = ax.xaxis if axis == "x" else ax.yaxis
    which.set_major_locator(FixedLocator(list(values)))
    which.set_major_formatter(FixedFormatter(list(labels)))
    which.set_minor_locator(NullLocator())
    ax.tick_params(axis=axis, length=0, pad=5, labelsize=SMALL, labelcolor=LIGHT["muted"])
    if grid:
        ax.grid(axis=axis, color=LIGHT["grid"], linewidth=1.0)
        ax.set_axisbelow(True)


def dots(
    ax: Axes,
    points: Iterable[tuple[float, float]],
    token: str,
    size: float,
    shape: str = "o",
    alpha: float | None = None,
) -> Any:
    """Marks at points of the data, as one artist."""
    x, y = zip(*points, strict=True)
    (made,) = ax.plot(x, y, shape, color=LIGHT[token], markersize=size, alpha=alpha, clip_on=False)
    return made


PLACES = tuple(
    (right, up, align)
    for far in (1, 2, 3)
    for up in (5 * far, -6 - 9 * far)
    for right, align in ((6, "left"), (-6, "right"))
)
"""Positions of a point's label: pixels to the right and up, the nearest first."""
Label = tuple[float, float, str, str, bool]
"""A point, its text and colour, and whether the text is bold."""


def labels(ax: Axes, found: Sequence[Label], dots: Sequence[tuple[float, float]] = ()) -> None:
    """Places texts beside points without overlaps; a text without room is left out.

    The first are placed first.
    """
    frame, points = ax.get_window_extent(), 72 / ax.figure.dpi
    marks = [points * ax.transData.transform(dot) for dot in dots]
    taken = [(x - 3.0, y - 3.0, x + 3.0, y + 3.0) for x, y in marks]
    for x, y, text, token, bold in found:
        at, wide = points * ax.transData.transform((x, y)), text_width(text, SMALL)
        for right, up, align in PLACES:
            left = at[0] + right - (wide if align == "right" else 0.0)
            box = left, low, end, top = (left, at[1] + up - 2.0, left + wide, at[1] + up + SMALL * 0.8)
            inside = points * frame.x0 <= box[0] and box[2] <= points * frame.x1 + MARGIN + 10
            if inside and not any(left < x[2] and x[0] < end and low < x[3] and x[1] < top for x in taken):
                label(ax, x, y, text, token, (right, up), align, bold)
                taken.append(box)
                break


def label(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    token: str = "ink",
    offset: tuple[float, float] = (0, 0),
    align: str = "left",
    bold: bool = False,
) -> None:
    """Places a text beside a point of the data, `offset` pixels to the right and up."""
    ax.annotate(
        text,
        (x, y),
        xytext=offset,
        textcoords="offset points",
        annotation_clip=False,
        **_letters(token, SMALL, align, bold),
    )
