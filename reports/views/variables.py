"""Dimensions with their axes and the size left on a device; variables, equal ones as one row with a count."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from layoutopt.plan.details import VariableDetail
from layoutopt.plan.schema import PlanFile

NUMBERS = re.compile(r"\d+")


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


class VariableGroup(VariableDetail):
    """Variables of the same shape and split as one; `alike` is their number."""

    alike: int = 1


def grouped(plan: PlanFile) -> tuple[VariableGroup, ...]:
    """One variable for all whose names differ only in numbers, by bytes per device, largest first.

    A group's bytes are those of one member; `alike` is the number of members. Its name has '*' where the
    numbers differ.
    """
    groups: dict[tuple[object, ...], list[VariableDetail]] = {}
    for v in plan.details.variables:
        key = (NUMBERS.sub("*", v.name), v.shape, v.dtype, v.splits, v.kind, v.local_bytes)
        groups.setdefault(key, []).append(v)
    rows = [VariableGroup(**{**dict(g[0]), "name": _shared(g)}, alike=len(g)) for g in groups.values()]
    return tuple(sorted(rows, key=lambda v: -v.local_bytes * v.alike))


def _shared(group: list[VariableDetail]) -> str:
    """The common name; a number that all members share stays."""
    if len(group) == 1:
        return group[0].name
    numbers = [NUMBERS.findall(v.name) for v in group]
    shared = [len(set(column)) == 1 for column in zip(*numbers, strict=True)]
    position = iter(range(len(shared)))

    def put(match: re.Match[str]) -> str:
        return match.group() if shared[next(position)] else "*"

    return NUMBERS.sub(put, group[0].name)


def totals(plan: PlanFile) -> tuple[float, float]:
    """Bytes of all variables, and bytes of them on one device."""
    found = plan.details.variables
    return sum(v.bytes for v in found), sum(v.local_bytes for v in found)


def shape_text(variable: VariableDetail) -> str:
    """'vocab 32768 × d_model 1024'; a scalar has no dimensions."""
    return " × ".join(f"{dim} {size:,}" for dim, size in variable.shape) or "scalar"


def split_text(variable: VariableDetail) -> str:
    """'vocab over model'; nothing split is 'whole on every device'."""
    parts = [
        f"{dim} over {'+'.join(axes)}"
        for (dim, _), axes in zip(variable.shape, variable.splits, strict=True)
        if axes
    ]
    return ", ".join(parts) or "whole on every device"


def piece_shares(variable: VariableGroup, plan: PlanFile) -> tuple[float, float]:
    """The piece's part of the box's width (the last dimension) and height (all dimensions before it)."""
    parts = [math.prod(plan.mesh.get(a, 1) for a in axes) for axes in variable.splits]
    return 1 / (parts[-1] if parts else 1), 1 / math.prod(parts[:-1])
