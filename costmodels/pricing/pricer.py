"""The price of a program: its items (`costmodels.pricing.itemise`), then seconds on a piece of hardware.

(1) compute seconds        = sum over computed items of times * t(flops, bytes)
    `costmodels.kernels.compute`, or `costmodels.pricing.op_by_op` where array functions are measured
(2) communication seconds  = sum over collectives of times * t(kind, axes, bytes)
    `costmodels.network.collectives`
(3) exposed communication  = sum over collectives of (1 - hidden fraction of its rule) * its seconds;
    where the products between start and done hide a message, what takes longer than these
    (`costmodels.pricing.overlap`)
(4) step seconds           = compute + exposed communication
(5) what goes over the host link is communication: bytes / bandwidth, one direction after the other; exposed,
    but for what a loop moves under its products

Items add up over programs; seconds are computed last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from costmodels.hardware import Hardware, Torus
from costmodels.kernels.compute import Quantity, compute_seconds
from costmodels.kernels.fused import Fused
from costmodels.network.collectives import collective_cost, full_bytes
from costmodels.network.topology import MeshPlacement, place
from costmodels.pricing.hidden import Cost, Line, is_launched
from costmodels.pricing.itemise import Itemiser
from costmodels.pricing.items import Called, Computed, Item, Sent, Transferred
from costmodels.pricing.op_by_op import OpByOp
from costmodels.pricing.overlap import ACTIVATION
from costmodels.pricing.templates import Instance, ItemisedCost
from costmodels.pricing.units import PlacedValue, brought, label
from mesh_tf_core.ir.dims import SparseDim
from mesh_tf_core.ir.instructions import GRADIENT
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Origin, Program
from mesh_tf_core.ir.values import local_type

__all__ = ["Cost", "Line", "Pricer", "price", "pricer"]


@dataclass
class Pricer:
    """Predicts programs of one mesh on one piece of hardware, with a cache.

    Attributes:
      hidden: an axis; nothing waits for messages over it.
    """

    hardware: Hardware
    placement: MeshPlacement
    hidden: str = ""
    _compute: dict[Quantity, float] = field(default_factory=dict)
    _collective: dict[tuple[str, Axes, int, SparseDim | None], float] = field(default_factory=dict)
    _called: dict[Called, float] = field(default_factory=dict)
    _instances: dict[Instance, float] = field(default_factory=dict)
    _pieces: dict[PlacedValue, TensorType] = field(default_factory=dict)
    _without: dict[str, Pricer] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> Pricer:
        """The same with other names of mesh axes; results that depend on no axis are shared."""
        placement, hidden = self.placement.renamed(names), names.get(self.hidden, self.hidden)
        return type(self)(self.hardware, placement, hidden, self._compute, _called=self._called)

    def without(self, axis: str) -> Pricer:
        """The same, with all messages over an axis hidden by later steps; repeated calls return one
        object."""
        if axis not in self._without:
            same = self.hardware, self.placement, axis, self._compute, self._collective
            self._without[axis] = type(self)(*same)
        return self._without[axis]

    @property
    def devices(self) -> int:
        return self.placement.mesh.devices

    @property
    def interval(self) -> float:
        """`Cost.interval`."""
        return each.value if (each := self.hardware.chip.host_interval) else 0.0

    @cached_property
    def itemiser(self) -> Itemiser:
        """The division of programs into items on this hardware."""
        return Itemiser.of(self.hardware)

    @cached_property
    def _op_by_op(self) -> OpByOp:
        return OpByOp(self.hardware, self.devices, self._called)

    @property
    def pieces_cost_more(self) -> bool:
        """True if n times the price of an n-th of some work is never less than the price of the whole.

        True for rooflines with padding and for latency and bandwidth (tests/costmodels/test_pieces.py);
        measured curves may differ if pieces fit into a cache.
        """
        return not self.hardware.compute_curves and not self.hardware.collective_curves

    # -- programs --------------------------------------------------------------------------------------------

    def cost(self, program: Program, kernels: Fused | None = None) -> Cost:
        """The price of a step; `kernels` as in `lines`."""
        start = self.itemiser.compiler.start(program)
        lines = [*self.lines(program, kernels)]
        if start is not None and (fixed := self.seconds_of(start)[0]):
            lines.append(Line("step", "", Origin(-1, "step", Phase.UPDATE), 1, start, fixed, fixed))
        return Cost(tuple(lines), self.interval)

    def lines(self, program: Program, kernels: Fused | None = None) -> Iterable[Line]:
        """A line for every item.

        Args:
          kernels: of the program, where they are known.
        """
        kernels = kernels or self.itemiser.compiler.kernels(program)
        find, local, mesh = program.values.__getitem__, program.local, program.mesh
        for unit, times, counts, sending in self.itemiser.units(program, kernels):
            for item in self.itemiser.items(unit, sending, find, local, mesh):
                line = Line(*label(unit, item), times, item, *self.seconds_of(item), brought(unit))
                yield line if counts == 1 else line.counted(counts)

    def seconds(self, program: Program) -> float:
        """Seconds of the instructions alone: the price of a step without its fixed part."""
        return sum(line.exposed * line.times for line in self.lines(program))

    def fixed_seconds(self, program: Program) -> float:
        """The fixed seconds of a step under every layout, priced op by op."""
        start = self.itemiser.compiler.start(program)
        return 0.0 if start is None else self.seconds_of(start)[0]

    def total(self, cost: ItemisedCost) -> float:
        """Seconds of an itemised cost from any mesh, with the axes' names of this one."""
        total = 0.0
        for instance, times in cost:
            seconds = self._instances.get(instance)
            if seconds is None:
                items = instance.items(self.itemiser, self._piece, self.placement.mesh)
                seconds = self._instances[instance] = sum([self.seconds_of(item)[1] for item in items])
            total += times * seconds
        return total

    def computed(self, cost: ItemisedCost) -> float:
        """Seconds of the computation of an itemised cost: its total without messages."""
        return self.total(tuple([each for each in cost if each[0].collective is None]))

    def _piece(self, placed: PlacedValue) -> TensorType:
        """The type of a device's piece of a value."""
        found = self._pieces.get(placed)
        if found is None:
            found = local_type(placed.shape, placed.dtype, placed.splits, self.placement.mesh)
            self._pieces[placed] = found
        return found

    # -- items -----------------------------------------------------------------------------------------------

    def seconds_of(self, item: Item) -> tuple[float, float]:
        """Seconds of one run of an item, and the exposed part, equation (3)."""
        if isinstance(item, Computed):
            seconds = self._compute.get(item.quantity)
            if seconds is None:
                seconds = compute_seconds(self.hardware, item.quantity, self.devices)
                self._compute[item.quantity] = seconds
        elif isinstance(item, Sent):
            seconds = self._sent(item)
            if self.hidden in item.axes:
                return seconds, 0.0
            if item.between:
                return seconds, max(0.0, seconds - self._between(item))
            return seconds, seconds * (1.0 - self.hardware.hidden_fraction(item.purpose))
        elif isinstance(item, Called):
            seconds = self._op_by_op.called(item)
        elif isinstance(item, Transferred):
            seconds = self.hardware.host_seconds(item.sent, item.updated)
            return seconds, max(0.0, seconds - self._between(item))
        else:
            seconds = self._op_by_op.started(item)
        return seconds, seconds

    def _between(self, item: Sent | Transferred) -> float:
        """Seconds of the products between start and done that hide a message."""
        return sum(part * self.seconds_of(each)[0] for each, part in item.between)

    def payloads(self, item: Sent) -> Sequence[int]:
        """Bytes that a collective is priced by. On a torus, pieces that go beyond the next chip share links;
        a transfer in both directions of a ring takes as long as half of it in one."""
        if not isinstance(self.hardware.topology, Torus):
            return item.payloads
        if item.both_ways and self.placement.route(item.axes).is_ring:
            return [max(1, size // 2) for size in item.payloads]
        return item.payloads if item.crossings == 1 else [size * item.crossings for size in item.payloads]

    def _sent(self, item: Sent) -> float:
        """Values that travel together pay for their bytes each, and for one latency (that of one byte)
        together; none if a larger message takes them along."""
        payloads = self.payloads(item)
        total = sum([self._message(item.kind, item.axes, payload, item.experts) for payload in payloads])
        alone = 0 if item.joined else 1 if item.together else len(payloads)
        return total - (len(payloads) - alone) * self._message(item.kind, item.axes, 1)

    def message_seconds(self, axes: Axes, size: int, late: bool = False, kind: str = "all_reduce") -> float:
        """Exposed seconds of a message of `size` bytes on a device: of gradients, or awaited (`late`)."""
        if self.hidden in axes:
            return 0.0
        hidden = self.hardware.hidden_fraction(ACTIVATION if late else GRADIENT)
        return self._message(kind, axes, size) * (1.0 - hidden)

    def _message(self, kind: str, axes: Axes, payload: int, experts: SparseDim | None = None) -> float:
        key = (kind, axes, payload, experts)
        seconds = self._collective.get(key)
        if seconds is None:
            size = full_bytes(kind, payload, self.placement.mesh.group_size(axes))
            seconds = collective_cost(self.hardware, self.placement, kind, axes, size, experts).seconds
            self._collective[key] = seconds
        return seconds


class LaunchPricer(Pricer):
    """Prices of what the host does, `Cost.launched`, in place of what it launches."""

    def seconds_of(self, item: Item) -> tuple[float, float]:
        return (self.interval * is_launched(item),) * 2

    def _message(self, *_: object) -> float:
        return 0.0


def pricer(hardware: Hardware, program_or_mesh: object, placement: MeshPlacement | None = None) -> Pricer:
    """A Pricer for a mesh (or the mesh of a program); `placement` defaults to the hardware's best."""
    mesh = getattr(program_or_mesh, "mesh", program_or_mesh)
    return Pricer(hardware, placement or place(hardware, mesh))  # type: ignore[arg-type]


def price(program: Program, hardware: Hardware, placement: MeshPlacement | None = None) -> Cost:
    """The price of one step of `program` on `hardware`."""
    return pricer(hardware, program, placement).cost(program)
