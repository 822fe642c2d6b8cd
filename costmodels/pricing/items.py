"""Bills: what the price of a program follows from, without the sizes of the mesh.

A program is a list of items: instructions, and groups of them that fuse. An item is its operations and how
they are connected (its form), and the global shapes, splits and dtypes of its values. On a mesh the values
have pieces, and items of one form whose pieces have the same types do the same: a search meets few of them,
in many programs. Which items a program has follows from its outline (`costmodels.pricing.structure`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from costmodels.kernels.compute import Quantity
from costmodels.kernels.fusion import Unit
from costmodels.kernels.groups import Group, Lone, streamed
from costmodels.pricing.structure import outline
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import Collective, Local, Loop, Permute, Program, Value

Priced = tuple[Unit, float, str]
"""A unit of a program, how often it runs, and the purpose of a collective (see `Form`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A value's global shape, splits and dtype; equal ones of one `Items` are one object."""

    shape: Shape
    splits: tuple[Axes, ...]
    dtype: str


Places = dict[tuple[Axes, ...], Placed]
"""All values of one shape and dtype, by their splits."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """All of an item but the sizes and splits of its values; equal ones of one `Items` are one object.

    Attributes:
      unit: where it was met first; `values` are the ids of its values there.
      purpose: of a collective, its class of `costmodels.pricing.overlap`.
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
      sent: a collective with its axes.
    """

    form: Form
    values: tuple[Placed, ...]
    sent: Collective | None


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A program that is priced as a whole."""

    program: Program
    again: bool


Bill = tuple[tuple[Item | Whole, float], ...]
"""Items, each with how often it runs."""


@dataclass(frozen=True, slots=True)
class Row:
    """An item of all programs of one outline.

    Attributes:
      values: ids of its values, and what they are by their splits.
      times: how often it runs.
      sent: the number of a collective in its program.
    """

    form: Form
    values: Sequence[tuple[int, Places]]
    times: float
    sent: int | None


class Items:
    """All items that were met in the programs of one graph."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, tuple[Row, ...]] = {}
        self._forms: dict[Hashable, Form] = {}
        self._places: dict[tuple[Shape, str], Places] = {}
        self._known: dict[Hashable, Item] = {}

    def bill(
        self, program: Program, again: bool, streams: bool, units: Callable[[], Iterable[Priced]]
    ) -> Bill:
        """A program as items.

        Args:
          again, streams: see `costmodels.kernels.fusion.fused`.
          units: what the program consists of; asked for one program of every outline.
        """
        key, sent = outline(program, streams)
        rows = self._rows.get((key, again))
        if rows is None:
            rows = self._rows[key, again] = tuple(self._read(program, sent, streams, units()))
        return tuple((self._item(row, program.values, sent), row.times) for row in rows)

    def _item(self, row: Row, values: Sequence[Value], sent: Sequence[Collective]) -> Item:
        placed = tuple([_placed(values[i], places) for i, places in row.values])
        instr = None if row.sent is None else sent[row.sent]
        key = row.form, placed, () if instr is None else (instr.axes, _how(instr))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Item(row.form, placed, instr)
        return found

    def _read(
        self, program: Program, sent: Sequence[Collective], streams: bool, units: Iterable[Priced]
    ) -> Iterator[Row]:
        """The rows of a program's outline."""
        number = {id(instr): i for i, instr in enumerate(sent)}
        for unit, times, purpose in units:
            told = described(unit, program, streams)
            if told is not None:
                structure, ids = told
                kinds = [(program.values[i].shape, program.values[i].dtype) for i in ids]
                key = structure, purpose, tuple((shape.names, dtype) for shape, dtype in kinds)
                form = self._forms.get(key)
                if form is None:
                    form = self._forms[key] = Form(unit, ids, purpose)
                places = [self._places.setdefault(kind, {}) for kind in kinds]
                yield Row(form, tuple(zip(ids, places, strict=True)), times, number.get(id(unit)))


def described(found: Unit, program: Program, streams: bool) -> tuple[Hashable, Sequence[int]] | None:
    """Operations and connections, and the values of which only the types of the pieces matter; None if it
    takes no time.

    Args:
      streams: attention is one kernel (`costmodels.kernels.fusion`).
    """
    if isinstance(found, Group | Lone):
        return found.signature()
    if isinstance(found, Local):
        return None if found.op.free else ((found.op, len(found.inputs)), (*found.inputs, *found.outputs))
    if isinstance(found, Collective):
        return found.name, found.inputs
    if isinstance(found, Loop):
        written = tuple(r.outer for r in found.stacked if not (streams and streamed(program, r.outer)))
        return (("stack", found.reverse), written) if written else None
    return None


def _placed(value: Value, places: Places) -> Placed:
    found = places.get(value.splits)
    if found is None:
        found = places[value.splits] = Placed(value.shape, value.splits, value.dtype)
    return found


def _how(sent: Collective) -> Hashable:
    """What decides the price of a collective besides its axes and bytes."""
    return (sent.shift, sent.wrap, sent.pairs) if isinstance(sent, Permute) else None
