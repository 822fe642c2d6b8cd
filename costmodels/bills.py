"""Bills: what the price of a program follows from, without the sizes of the mesh.

A program is a list of items: instructions, and groups of them that fuse. An item is its operations and how
they are connected (its form), and the global shapes, splits and dtypes of its values. On a mesh the values
have pieces, and items of one form whose pieces have the same types do the same: a search meets few of them,
in many programs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from costmodels.compute import Quantity
from costmodels.fusion import Unit
from costmodels.groups import Group, Lone, streamed
from mesh_tf_core.dims import Shape
from mesh_tf_core.layout import Axes
from mesh_tf_core.program import Collective, Local, Loop, Permute, Program, Value


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A value's global shape, splits and dtype; equal ones of one `Items` are one object."""

    shape: Shape
    splits: tuple[Axes, ...]
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """All of an item but the sizes and splits of its values; equal ones of one `Items` are one object.

    Attributes:
      unit: where it was met first; `values` are the ids of its values there.
      purpose: of a collective, its class of `costmodels.overlap`.
      quantities: sizes of the values' pieces -> what is done.
    """

    unit: Unit
    values: Sequence[int]
    purpose: str
    quantities: dict[tuple[tuple[int, ...], ...], tuple[Quantity, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Something that is priced by itself; equal ones of one `Items` are one object.

    Attributes:
      axes: of a collective.
    """

    form: Form
    values: tuple[Placed, ...]
    axes: Axes


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A program that is priced as a whole."""

    program: Program
    again: bool


Bill = tuple[tuple[Item | Whole, float], ...]
"""Items, each with how often it runs."""


class Items:
    """All items that were met."""

    def __init__(self) -> None:
        self._placed: dict[tuple[Shape, tuple[Axes, ...], str], Placed] = {}
        self._forms: dict[Hashable, Form] = {}
        self._known: dict[Hashable, Item] = {}

    def of(self, found: Unit, purpose: str, streams: bool, program: Program) -> Item | None:
        """An instruction or group as an item; None if it takes no time.

        Args:
          streams: attention is one kernel (`costmodels.fusion`).
          purpose: see `Form`.
        """
        told = described(found, program, streams)
        if told is None:
            return None
        structure, ids = told
        values = [program.values[i] for i in ids]
        key = structure, purpose, tuple((v.shape.names, v.dtype) for v in values)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = Form(found, ids, purpose)
        placed = tuple(map(self._place, values))
        axes = found.axes if isinstance(found, Collective) else ()
        item = self._known.get((form, axes, placed))
        if item is None:
            item = self._known[form, axes, placed] = Item(form, placed, axes)
        return item

    def _place(self, value: Value) -> Placed:
        key = value.shape, value.splits, value.dtype
        found = self._placed.get(key)
        if found is None:
            found = self._placed[key] = Placed(*key)
        return found


def described(found: Unit, program: Program, streams: bool) -> tuple[Hashable, Sequence[int]] | None:
    """Operations and connections, and the values of which only the types of the pieces matter."""
    if isinstance(found, Group | Lone):
        return found.signature()
    if isinstance(found, Local):
        return None if found.op.free else ((found.op, len(found.inputs)), (*found.inputs, *found.outputs))
    if isinstance(found, Collective):
        how = (found.shift, found.wrap, found.pairs) if isinstance(found, Permute) else ()
        return (found.name, how), found.inputs
    if isinstance(found, Loop):
        written = tuple(o for _, o in found.stacked if not (streams and streamed(program, o)))
        return (("stack", found.reverse), written) if written else None
    return None
