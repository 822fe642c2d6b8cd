"""The units of a program that are priced on their own, before they have sizes (see `itemise`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from costmodels.kernels.groups import Group, VariableCast
from costmodels.kernels.partition import FusedKernel
from costmodels.pricing.items import Item, Sent
from costmodels.pricing.overlap import Overlapped
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Collective, Local, Loop, Origin, Transfer
from mesh_tf_core.ir.values import Value


@dataclass(frozen=True, slots=True)
class Stack:
    """The writes of a loop to one value that it stacks or adds up.

    Attributes:
      value: with the size of the part that one run writes.
      passes: how often its bytes are read or written.
      through: a separate kernel sets it to zero before, or copies the stacked values.
    """

    loop: Loop
    value: int
    passes: float = 1
    through: bool = False


Unit: TypeAlias = "Local | Collective | Transfer | Overlapped | FusedKernel | Group | VariableCast | Stack"
"""A unit that is priced on its own; a group is one unit with an item for each of its kernels."""


@dataclass(frozen=True, slots=True)
class Sending:
    """The inputs of a collective's cost besides its axes and bytes.

    Attributes:
      purpose: its rule (`costmodels.pricing.overlap`).
      parts: number of parts in which each of its values is sent separately; none if they travel together.
      joins: if it is small, it travels with a larger one.
    """

    purpose: str
    parts: tuple[int, ...] = ()
    joins: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PlacedValue:
    """A value's global shape, splits and dtype; equal ones of one `Templates` are one object."""

    shape: Shape
    splits: tuple[Axes, ...]
    dtype: str


Find = Callable[[int], Value | PlacedValue]
"""A value of a program by its id."""


def stays(phase: Phase) -> bool:
    """True if the results of a phase stay (`costmodels.kernels.calls`, equation (2))."""
    return phase != Phase.UPDATE


def split_names(values: Iterable[Value | PlacedValue]) -> frozenset[str]:
    """Names of the dimensions that are split in any of some values."""
    return frozenset(name for v in values for name, axes in zip(v.shape.names, v.splits, strict=True) if axes)


def first_of(unit: Unit) -> Local | Collective | Transfer:
    """The first instruction of a unit that is no stack."""
    assert not isinstance(unit, Stack)
    if isinstance(unit, VariableCast):
        return unit.instr
    if isinstance(unit, FusedKernel | Group):
        return unit.instrs[0]
    return unit.message if isinstance(unit, Overlapped) else unit


def label(unit: Unit, item: Item) -> tuple[str, str, Origin]:
    """Name, text and origin of an item of a unit, for its line."""
    if isinstance(unit, FusedKernel):
        first = unit.product or unit.instrs[0]
        text = " + ".join(instr.name for instr in unit.instrs) if len(unit.instrs) > 1 else ""
        return first.name, text, first.origin
    if isinstance(unit, Stack):
        return "stack", unit.loop.text(), unit.loop.origin
    unit = unit.message if isinstance(unit, Overlapped) else unit
    assert isinstance(unit, Local | Collective | Transfer)
    if isinstance(unit, Collective) and not isinstance(item, Sent):
        return "copy", unit.text(), unit.origin
    return unit.name, unit.text() if isinstance(unit, Collective) else "", unit.origin


def brought(unit: Unit) -> int:
    """The first value that a message brings; -1 of other units."""
    message = unit.message if isinstance(unit, Overlapped) else unit
    return message.outputs[0] if isinstance(message, Collective | Transfer) else -1
