"""The shards of dimensions and variables: dimensions against axes, the piece of each variable on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import bytes_text, percent, plural, shorten
from reports.figures.chart import SEARCH, chart
from reports.figures.sheet import MARGIN, SMALL, WIDTH, FigureSheet, text_width
from reports.tables import rows as tables
from reports.theme import axis_token
from reports.views.variables import (
    VariableGroup,
    dimension_rows,
    grouped,
    piece_shares,
    shape_text,
    split_text,
    totals,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_DIMS = 24
MOST_VARIABLES = 10


def _find_matrix(plan: PlanFile) -> str:
    """The number of dimensions that are split."""
    rows = dimension_rows(plan)
    split = [r for r in rows if r.axes]
    whole = len(rows) - len(split)
    axes = "1 axis" if len(plan.mesh) == 1 else f"{len(plan.mesh)} axes"
    text = f"{plural(len(split), 'dimension')} split over {axes}"
    return f"{text}, {whole:,} not split" if plan.details.dims else text


def _piece(sheet: FigureSheet, variable: VariableGroup, plan: PlanFile, x: float, y: float) -> None:
    width, height = 60.0, 34.0
    across, down = piece_shares(variable, plan)
    sheet.rect(x, y, width, height, "grid")
    sheet.rect(x, y, max(width * across, 2.5), max(height * down, 2.5), "variables")
    sheet.frame(x, y, width, height, "rule")


def _find_pieces(plan: PlanFile) -> str:
    """The fraction of all variables that a device holds."""
    whole, local = totals(plan)
    if not whole:
        return "The plan has no variables"
    return (
        f"A device stores {bytes_text(local)} of the {bytes_text(whole)} of variables "
        f"({percent(local / whole)})"
    )


@chart(
    "Dimensions and axes",
    _find_matrix,
    tables.dims,
    lambda plan: "" if plan.layout or plan.details.dims else SEARCH,
)
def matrix(plan: PlanFile, title: str = "") -> Figure:
    """Rows are dimensions, columns mesh axes; a filled cell is a split; the right column is the size on a
    device."""
    rows = dimension_rows(plan)[:MOST_DIMS]
    axes = list(plan.mesh)
    left = 170.0
    width = min(90.0, (WIDTH - left - 52) / max(len(axes), 1))
    sheet = FigureSheet(30 + 24 * len(rows), title)
    for c, axis in enumerate(axes):
        words = shorten(f"{axis} {plan.mesh[axis]}", max(4, int(width / (0.61 * SMALL))))
        sheet.text(
            left + c * width + width / 2, 16, words, axis_token(axis, axes), SMALL, "center", bold=True
        )
    sheet.text(WIDTH - MARGIN, 16, "piece", "muted", SMALL, "right")
    for r, row in enumerate(rows):
        y = 26 + 24 * r
        sheet.text(MARGIN, y + 15, shorten(row.name, 15), "ink" if row.axes else "muted", bold=bool(row.axes))
        size = f"{row.size:,}" if row.size else ""
        sheet.text(left - 10, y + 15, size, "muted", SMALL, "right")
        for c, axis in enumerate(axes):
            box = (left + c * width + 2, y + 1, width - 4, 20)
            if axis in row.axes:
                sheet.rect(*box, axis_token(axis, axes))
            else:
                sheet.frame(*box, "grid")
        if row.piece:
            sheet.text(
                WIDTH - MARGIN, y + 15, f"{row.piece:,}", "ink" if row.axes else "muted", SMALL, "right"
            )
    return sheet.figure


@chart(
    "Shards of the variables",
    _find_pieces,
    tables.variable_groups,
    lambda plan: "" if plan.details.variables else SEARCH,
)
def pieces(plan: PlanFile, title: str = "") -> Figure:
    """A box for each variable; its filled corner is the part that one device holds."""
    rows = grouped(plan)[:MOST_VARIABLES]
    sheet = FigureSheet(46 * len(rows) + 2, title)
    for position, variable in enumerate(rows):
        y = 46 * position
        _piece(sheet, variable, plan, MARGIN, y + 4)
        times = f" × {variable.alike}" if variable.alike > 1 else ""
        value = bytes_text(variable.local_bytes * variable.alike)
        room = WIDTH - 74 - text_width(value + times, SMALL) - 10
        sheet.text(
            74, y + 17, shorten(variable.name, int(room / (0.66 * SMALL))) + times, size=SMALL, bold=True
        )
        sheet.text(WIDTH - MARGIN, y + 17, value, size=SMALL, align="right")
        sheet.text(74, y + 33, shorten(f"{shape_text(variable)}: {split_text(variable)}", 49), "muted", 10.5)
    return sheet.figure
