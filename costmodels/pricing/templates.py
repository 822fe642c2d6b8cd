"""Itemised costs of many programs of one graph, each made once.

Most layouts lead to the same instructions on the same values; only the splits of values and the axes of
collectives differ. Programs that agree in all but these have the same structural key: the same operations
share kernels, and messages start by the same rules (`costmodels.kernels.fused`,
`costmodels.pricing.overlap`). Costs of single units are therefore read off one program of every structural
key.

A kernel template is all of a unit but the sizes and splits of its values: its operations and how they are
connected. An instance is a template with its values. On a mesh its values have shards, and instances of one
template whose shards have the same types have the same items: a search has few of them, in many programs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from costmodels.kernels.groups import Group, VariableCast
from costmodels.pricing.itemise import Itemiser, between_of
from costmodels.pricing.items import Between, Item
from costmodels.pricing.overlap import Overlapped
from costmodels.pricing.units import PlacedValue, Sending, Stack, Unit, stays
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Collective, Instr, Local, Loop, Message, Permute, Program, Transfer, Value

BySplits = dict[tuple[Axes, ...], PlacedValue]
"""All values of one shape and dtype, by their splits."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelTemplate:
    """All of a unit except the sizes and splits of its values; equal ones of one `Templates` are one object.

    Attributes:
      unit: its first occurrence; `values` are the ids of its values there.
      known: sizes of the values' shards, and further inputs of items (`Compiler.known_by`) -> items.
    """

    unit: Unit
    values: Sequence[int]
    sending: Sending | None
    known: dict[Hashable, tuple[Item, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """A template with its values, and the collective with its axes; equal ones of one `Templates` are one
    object."""

    template: KernelTemplate
    values: tuple[PlacedValue, ...]
    collective: Collective | None

    def items(
        self, itemiser: Itemiser, piece: Callable[[PlacedValue], TensorType], mesh: Mesh
    ) -> tuple[Item, ...]:
        """Its items on a mesh; `piece` gives the type of a device's piece of a value."""
        template, types = self.template, [piece(placed) for placed in self.values]
        if self.collective is not None:
            assert template.sending is not None
            between: Between = ()
            if isinstance(template.unit, Overlapped):
                local = dict(zip(template.values, types, strict=True)).__getitem__
                between = between_of(template.unit, local)
                types = types[: len(self.collective.inputs)]
            return itemiser.of_collective(self.collective, template.sending, types, mesh, between)
        key = tuple([(t.shape.sizes, t.shape.size) for t in types]), itemiser.compiler.known_by(self.values)
        items = template.known.get(key)
        if items is None:
            local = dict(zip(template.values, types, strict=True)).__getitem__
            find = dict(zip(template.values, self.values, strict=True)).__getitem__
            items = template.known[key] = itemiser.items(template.unit, None, find, local, mesh)
        return items


ItemisedCost = tuple[tuple[Instance, float], ...]
"""The price of a program before its mesh has sizes: instances, each with how often it runs."""


@dataclass(frozen=True, slots=True)
class _Row:
    """An instance in all programs of one structural key.

    Attributes:
      values: ids of its values, and what they are by their splits.
      sent: the number of a collective in its program.
    """

    template: KernelTemplate
    values: Sequence[tuple[int, BySplits]]
    times: float
    sent: int | None


class Templates:
    """All templates and instances in the programs of one graph."""

    def __init__(self, itemiser: Itemiser) -> None:
        self._itemiser = itemiser
        self._rows: dict[Hashable, tuple[_Row, ...]] = {}
        self._templates: dict[Hashable, KernelTemplate] = {}
        self._values: dict[tuple[Shape, str], BySplits] = {}
        self._instances: dict[Hashable, Instance] = {}

    def itemised(self, program: Program) -> ItemisedCost:
        """A program's itemised cost."""
        key, sent = structural_key(program)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = tuple(self._read(program, sent))
        return tuple([(self._instance(row, program.values, sent), row.times) for row in rows])

    def _instance(self, row: _Row, values: Sequence[Value], sent: Sequence[Collective]) -> Instance:
        placed = tuple([_placed(values[i], known) for i, known in row.values])
        instr = None if row.sent is None else sent[row.sent]
        # What decides the price of a collective besides its axes and bytes.
        moved = isinstance(instr, Permute) and (instr.shift, instr.wrap, instr.pairs, instr.both_ways)
        key = row.template, placed, () if instr is None else (instr.axes, moved)
        found = self._instances.get(key)
        if found is None:
            found = self._instances[key] = Instance(row.template, placed, instr)
        return found

    def _read(self, program: Program, sent: Sequence[Collective]) -> Iterator[_Row]:
        """The rows of a program's structural key."""
        number = {id(instr): i for i, instr in enumerate(sent)}
        for unit, times, counts, sending in self._itemiser.units(program):
            structure, ids = _described(unit)
            kinds = [(program.values[i].shape, program.values[i].dtype) for i in ids]
            key = structure, sending, tuple((shape.names, dtype) for shape, dtype in kinds)
            template = self._templates.get(key)
            if template is None:
                template = self._templates[key] = KernelTemplate(unit, ids, sending)
            known = [self._values.setdefault(kind, {}) for kind in kinds]
            instr = unit.message if isinstance(unit, Overlapped) else unit
            yield _Row(template, tuple(zip(ids, known, strict=True)), times * counts, number.get(id(instr)))


def structural_key(program: Program) -> tuple[Hashable, list[Collective]]:
    """The structural key of a program among those of one graph, and its collectives in order."""
    sent: list[Collective] = []

    def block(code: Sequence[Instr]) -> Hashable:
        return tuple([of(instr) for instr in code])

    def of(instr: Instr) -> Hashable:
        origin = instr.origin
        if isinstance(instr, Local):
            return instr.op, instr.inputs, instr.outputs, origin.node, origin.phase
        if isinstance(instr, Loop):
            ways = instr.carried, instr.sliced, instr.stacked, instr.summed
            how = instr.dim, instr.reverse, instr.branch, instr.first, instr.offset
            return *how, ways, instr.inputs, block(instr.body)
        if isinstance(instr, Collective):
            sent.append(instr)
        rule = instr.rule if isinstance(instr, Message) else ""
        about = origin.node, origin.phase, getattr(instr, "combine", ""), rule
        return type(instr), instr.inputs, instr.outputs, *about

    values = tuple([(v.tensor, v.shape, v.dtype) for v in program.values])
    beside = tuple([(move.inputs, move.outputs) for move in program.beside])
    return (block(program.code), values, tuple(program.results.values()), beside), sent


def _described(unit: Unit) -> tuple[Hashable, Sequence[int]]:
    """Operations and connections, and the values of which only the types of the pieces matter."""
    if isinstance(unit, Group | VariableCast):
        return unit.signature()
    if isinstance(unit, Local):
        what = unit.op, len(unit.inputs), stays(unit.origin.phase)
        return what, (*unit.inputs, *unit.outputs)
    if isinstance(unit, Stack):
        return ("stack", unit.passes, unit.through), (unit.value,)
    if isinstance(unit, Overlapped):
        kernels = tuple((k.op, len(k.inputs), len(k.outputs), part) for k, part in unit.between)
        ids = (*unit.message.inputs, *(i for k, _ in unit.between for i in (*k.inputs, *k.outputs)))
        return (unit.message.name, kernels), ids
    assert isinstance(unit, Collective | Transfer)
    return (unit.name, isinstance(unit, Transfer) and unit.origin.phase == Phase.UPDATE), unit.inputs


def _placed(value: Value, known: BySplits) -> PlacedValue:
    found = known.get(value.splits)
    if found is None:
        found = known[value.splits] = PlacedValue(value.shape, value.splits, value.dtype)
    return found
