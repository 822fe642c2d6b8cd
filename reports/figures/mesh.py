"""The mesh as a grid of devices, with the dimensions on each of its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import bytes_text, shorten, some
from reports.figures.chart import chart
from reports.figures.sheet import MARGIN, SMALL, WIDTH, FigureSheet, text_width
from reports.plan import dims_on, lies_on
from reports.tables import rows as tables
from reports.theme import axis_token

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS, DOWN = 36, 32
"""Devices that a figure has room for; of longer axes the first devices are drawn."""
GAP = 0.55
"""Room between blocks of the next axis, in devices."""


@dataclass(frozen=True)
class _Axis:
    name: str
    size: int
    shown: int
    token: str
    down: bool
    step: float
    """Distance between neighbours along this axis, in cells."""


def _arrange(plan: PlanFile) -> list[_Axis]:
    """Axes in turn across and down, the last (fastest) innermost: dimensional stacking, wider than high."""
    sizes = list(plan.mesh.items())[::-1]
    turns = [i % 2 == 1 for i in range(len(sizes))]
    across, down = (
        math.prod(n for (_, n), d in zip(sizes, turns, strict=True) if d == way) for way in (False, True)
    )
    if down > across:
        turns = [not d for d in turns]
    shown = _shown(sizes, turns)
    steps = {False: 1.0, True: 1.0}
    found = []
    for (name, size), is_down in zip(sizes, turns, strict=True):
        token = axis_token(name, plan.mesh)
        found.append(_Axis(name, size, shown[name], token, is_down, steps[is_down]))
        steps[is_down] = steps[is_down] * shown[name] + GAP
    return found


def _shown(sizes: Sequence[tuple[str, int]], turns: Sequence[bool]) -> dict[str, int]:
    """How many devices of each axis there is room for."""
    shown = dict(sizes)
    for way, most in ((False, ACROSS), (True, DOWN)):
        names = [name for (name, _), d in zip(sizes, turns, strict=True) if d == way]
        while math.prod(shown[n] for n in names) > most:
            longest = max(names, key=lambda n: shown[n])
            if shown[longest] <= 2:
                break
            shown[longest] = max(2, shown[longest] * 2 // 3)
    return shown


def _devices(sheet: FigureSheet, axes: Sequence[_Axis], left: float, top: float, cell: float) -> None:
    groups: dict[str, list[tuple[float, float, float, float]]] = {}
    side = cell * 0.78
    for place in product(*(range(a.shown) for a in axes)):
        x = sum(i * a.step for i, a in zip(place, axes, strict=True) if not a.down)
        y = sum(i * a.step for i, a in zip(place, axes, strict=True) if a.down)
        moved = [a for i, a in zip(place, axes, strict=True) if i]
        token = "ink" if not moved else moved[0].token if len(moved) == 1 else "device"
        groups.setdefault(token, []).append((left + x * cell, top + y * cell, side, side))
    for token, boxes in groups.items():
        sheet.rects(boxes, token)
    inner = {False: True, True: True}
    for axis in axes:
        if axis.shown < axis.size:
            _more(sheet, axis, left, top, cell)
        if inner[axis.down]:
            _arrow(sheet, axis, left, top, cell)
            inner[axis.down] = False


def _arrow(sheet: FigureSheet, axis: _Axis, left: float, top: float, cell: float) -> None:
    """Along the innermost axis of each direction."""
    length = ((axis.shown - 1) * axis.step + 0.78) * cell
    if axis.down:
        x, end = left - 8, top + length
        sheet.line([(x, top), (x, end)], axis.token, 2)
        sheet.line([(x - 4, end - 5), (x, end), (x + 4, end - 5)], axis.token, 2)
    else:
        y, end = top - 7, left + length
        sheet.line([(left, y), (end, y)], axis.token, 2)
        sheet.line([(end - 5, y - 4), (end, y), (end - 5, y + 4)], axis.token, 2)


def _more(sheet: FigureSheet, axis: _Axis, left: float, top: float, cell: float) -> None:
    """Three dots where devices are left out."""
    start = ((axis.shown - 1) * axis.step + 1) * cell
    for i in range(3):
        shift = start + 3 + 6 * i
        if axis.down:
            sheet.rect(left + 4, top + shift - 2, 3, 3, axis.token)
        else:
            sheet.rect(left + shift, top + 4, 3, 3, axis.token)


def _legend(sheet: FigureSheet, plan: PlanFile, axis: _Axis, y: float) -> None:
    """Two lines: the axis, and what is split over it; where it lies on the hardware stands at their end."""
    sheet.rect(MARGIN, y + 6, 11, 11, axis.token)
    sheet.text(MARGIN + 18, y + 16, f"{shorten(axis.name, 22)} {axis.size}", axis.token, bold=True)
    sent = plan.predicted.communication_bytes_per_device.get(axis.name)
    if sent:
        sheet.text(
            WIDTH - MARGIN, y + 16, f"a device sends {bytes_text(sent)} per step", "muted", SMALL, "right"
        )
    dims = dims_on(plan, axis.name)
    words = shorten(f"splits {some(dims, 3, 14)}" if dims else "splits nothing", 56)
    sheet.text(MARGIN + 18, y + 32, words, size=SMALL)
    room = WIDTH - 2 * MARGIN - 30 - text_width(words, SMALL)
    lies = lies_on(plan, axis.name)
    if lies and text_width(lies, SMALL) <= room:
        sheet.text(WIDTH - MARGIN, y + 32, lies, "muted", SMALL, "right")


def _find_mesh(plan: PlanFile) -> str:
    """The uses of the mesh's axes."""
    if not plan.mesh:
        return "With one device, nothing is split"
    parts = []
    for axis, size in plan.mesh.items():
        dims = dims_on(plan, axis)
        parts.append(f"{shorten(axis, 24)} ({size}) splits {some(dims, 3, 20) if dims else 'nothing'}")
    return "; ".join(parts)


@chart("The mesh", _find_mesh, tables.axes)
def mesh(plan: PlanFile, title: str = "") -> Figure:
    """Devices as squares; those that the first device talks to along an axis have the axis's colour."""
    axes = _arrange(plan)
    across = sum((a.shown - 1) * a.step for a in axes if not a.down) + 1
    down = sum((a.shown - 1) * a.step for a in axes if a.down) + 1
    left = 18.0 if any(a.down for a in axes) else MARGIN
    top = 12.0
    cell = min(30.0, (WIDTH - left - 30) / across, 300.0 / down)
    height = top + down * cell + 14
    sheet = FigureSheet(height + 40 * len(axes) + 8, title)
    _devices(sheet, axes, left, top, cell)
    for position, axis in enumerate(axes):
        _legend(sheet, plan, axis, height + 40 * position)
    return sheet.figure
