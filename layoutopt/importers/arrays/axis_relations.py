"""Relations of two axes of arrays."""

from __future__ import annotations

from dataclasses import dataclass

from layoutopt.importers.arrays.contract import Operand

Axis = tuple[Operand, int]


@dataclass(frozen=True)
class Same:
    """Two axes are one.

    Attributes:
      kind: "ids" if both an index and its look-up have the axis; "sized" if the two may differ in size, as in
        strided windows; "product" of a dot_general; "cut" if they are two
        dimensions that are cut at the same places.
    """

    a: Axis
    b: Axis
    kind: str = ""


@dataclass(frozen=True)
class Regroup:
    """All elements of an array in row-major order, under other axes."""

    x: Operand
    y: Operand


@dataclass(frozen=True)
class AxisPart:
    """Axis `y` is one of `count` equal pieces of axis `x`."""

    x: Axis
    y: Axis
    count: int


@dataclass(frozen=True)
class Copies(AxisPart):
    """Axis `x` is `count` copies of axis `y`, one behind the other."""


@dataclass(frozen=True)
class Join:
    """Axis `y` is axes of equal size one behind the other."""

    xs: tuple[Axis, ...]
    y: Axis


AxisRelation = Same | Regroup | AxisPart | Join
