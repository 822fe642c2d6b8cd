"""Dimensions with the axes they are split over and the size that is left on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layoutopt.plan.schema import PlanFile


@dataclass(frozen=True)
class DimensionRow:
    """A dimension; `size` and `piece` are 0 if the plan does not have its length."""

    name: str
    size: int
    axes: tuple[str, ...]
    piece: int


def dimension_rows(plan: PlanFile) -> tuple[DimensionRow, ...]:
    """Split dimensions in the mesh's order, then those kept whole, the longest first."""
    order = {axis: i for i, axis in enumerate(plan.mesh)}
    names = dict.fromkeys([*plan.layout, *plan.details.dims])
    rows = []
    for name in names:
        axes = tuple(plan.layout.get(name, ()))
        size = plan.details.dims.get(name, 0)
        parts = math.prod(plan.mesh.get(a, 1) for a in axes)
        rows.append(DimensionRow(name, size, axes, -(-size // parts)))
    return tuple(sorted(rows, key=lambda r: ([order.get(a, 0) for a in r.axes] or [len(order)], -r.size)))
