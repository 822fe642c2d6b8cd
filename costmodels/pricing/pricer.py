"""The price of a program: quantities of every instruction, then seconds on a piece of hardware.

(1) compute seconds        = sum over local instructions of times * t(flops, bytes)
    `costmodels.kernels.compute`
(2) communication seconds  = sum over collectives of times * t(kind, axes, bytes)
    `costmodels.network.collectives`
(3) exposed communication  = sum over collectives of (1 - hidden fraction of its class) * its seconds
    `costmodels.pricing.overlap`
(4) step seconds           = compute + exposed communication

Quantities add up over instructions; seconds come last.

Hardware whose compiler fuses (`fuses` in its file) is priced kernel by kernel (`costmodels.kernels.fusion`):
(1) is then a sum over kernels, of the FLOPs of all their operations and the bytes that they read and write
together.

Hardware whose file has curves of classes `kernel.…` (a calibrated machine that runs the local engine) is
priced call by call (`costmodels.kernels.array_functions`), as that engine works: values that a loop stacks
stay in parts, which travel one by one; values that travel together are summed one by one; and a step has a
fixed part for its start and its stored variables. Where processes exchange messages, the engine joins what
travels together and what a loop stacks: this is priced as on other hardware.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from costmodels.hardware import Hardware, Torus
from costmodels.kernels.compute import Quantity, compute_seconds
from costmodels.kernels.fusion import Fused, Unit, fused, grouped
from costmodels.kernels.groups import Group, Lone, streamed
from costmodels.kernels.partition import Kernel
from costmodels.kernels.quantities import of_kernel, of_local, of_stack
from costmodels.network.collectives import collective_seconds, full_bytes
from costmodels.network.topology import Placement, place
from costmodels.pricing.items import Bill, Item, Items, Placed, Priced, Whole
from costmodels.pricing.lines import Cost, KernelKey, Line, Sent
from costmodels.pricing.op_by_op import Calls
from costmodels.pricing.overlap import ACTIVATION, GRADIENT, classes
from mesh_tf_core.ir.instructions import local_type
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import (
    AllReduce,
    Collective,
    Local,
    Loop,
    Origin,
    Permute,
    Program,
)

__all__ = ["Cost", "Line", "Pricer", "price", "pricer"]


@dataclass
class Pricer:
    """Prices programs of one mesh on one piece of hardware, remembering what it has priced."""

    hardware: Hardware
    placement: Placement
    _compute: dict[Quantity, float] = field(default_factory=dict)
    _collective: dict[tuple[str, Axes, int], float] = field(default_factory=dict)
    _called: dict[KernelKey, float | None] = field(default_factory=dict)
    _items: dict[Item | Whole, float] = field(default_factory=dict)
    _pieces: dict[Placed, TensorType] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> Pricer:
        """The same with other names for the mesh's axes; what depends on no axis is known to both."""
        return Pricer(self.hardware, self.placement.renamed(names), self._compute, _called=self._called)

    @property
    def devices(self) -> int:
        return self.placement.mesh.devices

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self.hardware, self.devices, self._called)

    @cached_property
    def by_call(self) -> bool:
        """Whether this hardware is priced call by call, as the local engine works."""
        return self._calls.measured

    @property
    def in_parts(self) -> bool:
        """Whether values that travel together, and parts of stacked ones, are summed one by one."""
        return self.by_call and self.hardware.devices_per_process is None

    @property
    def pieces_cost_more(self) -> bool:
        """Whether n times the price of an n-th of some work is never less than the price of the whole.

        True of rooflines with padding and of latency and bandwidth (tests/costmodels/test_pieces.py);
        measured curves may say otherwise, where pieces fit into a cache.
        """
        return not self.hardware.compute_curves and not self.hardware.collective_curves

    @cached_property
    def fuses(self) -> bool:
        """Whether operations are priced as the kernels that a compiler makes of them."""
        return self.hardware.fuses and not self.by_call

    def kernels(self, program: Program) -> Fused | None:
        """The kernels that are priced, for who needs them more than once; None where none are made."""
        return fused(program, streams=self.hardware.streams_attention) if self.fuses else None

    def lines(self, program: Program, again: bool = False, kernels: Fused | None = None) -> Iterable[Line]:
        """One line per instruction or kernel that takes time.

        Args:
          again: `program` is part of a loop's body that runs again for backward.
          kernels: of the program, where they are known.
        """
        stacks = _stacks(program) if self.in_parts else {}
        found = classes(program) if self.hardware.overlap else {}
        timed = self._timed(program, again) if kernels is None else kernels.items
        for item, times in timed:
            if isinstance(item, AllReduce) and self.in_parts:
                yield self._sums(program, item, times, stacks)
            else:
                yield from self._lines(program, item, times, found)

    def _timed(self, program: Program, again: bool) -> Iterable[tuple[Unit, float]]:
        """What is priced on its own, with how often it runs."""
        if self.fuses:
            return grouped(program, again, self.hardware.streams_attention)
        return program.expected()

    def _lines(
        self, program: Program, item: Unit | Kernel, times: float, purposes: Mapping[int, str]
    ) -> Iterable[Line]:
        if isinstance(item, Group | Lone | Kernel):
            for kernel in (item,) if isinstance(item, Kernel) else item.kernels(program.local):
                yield self.kernel(program, kernel, times)
        elif isinstance(item, Local) and not item.op.free:
            yield self.local(program, item, times)
        elif isinstance(item, Collective):
            yield self.collective(program, item, times, purposes.get(item.outputs[0], ACTIVATION))
        elif isinstance(item, Loop) and item.stacked:
            yield from self.stacking(program, item, times)

    def cost(self, program: Program, kernels: Fused | None = None) -> Cost:
        """The price of a step; `kernels` as in `lines`."""
        fixed = self.fixed_seconds(program)
        start = (Line("step", "", Origin(-1, "step", "update"), "step", 1, fixed, fixed),) if fixed else ()
        return Cost((*self.lines(program, kernels=kernels), *start))

    @property
    def itemising(self) -> Hashable:
        """Pricers in which this is the same make the same bills."""
        return self.by_call, self.fuses, self.hardware.streams_attention, bool(self.hardware.overlap)

    def bill(self, program: Program, items: Items, again: bool = False) -> Bill:
        """What the price of a program follows from; `again` as in `lines`."""
        if self.by_call:
            return ((Whole(program, again), 1),)
        return items.bill(
            program, again, self.hardware.streams_attention, lambda: self._units(program, again)
        )

    def _units(self, program: Program, again: bool) -> Iterable[Priced]:
        units = tuple(self._timed(program, again))
        sends = any(isinstance(unit, Collective) for unit, _ in units)
        purposes = classes(program) if sends and self.hardware.overlap else {}
        for unit, times in units:
            purpose = purposes.get(unit.outputs[0], ACTIVATION) if isinstance(unit, Collective) else ""
            yield unit, times, purpose

    def priced(self, bill: Bill) -> float:
        """Seconds of a bill from any mesh, with the axes' names of this one."""
        total = 0.0
        for item, times in bill:
            seconds = self._items.get(item)
            if seconds is None:
                seconds = self._items[item] = self._priced_item(item)
            total += times * seconds
        return total

    def _priced_item(self, item: Item | Whole) -> float:
        """Seconds of one run of an item that the step waits for."""
        if isinstance(item, Whole):
            return self.seconds(replace(item.program, mesh=self.placement.mesh), item.again)
        types = [self._piece(placed) for placed in item.values]
        form, sent = item.form, item.sent
        if sent is not None:
            payloads = self._payloads(sent, [t.bytes for t in types])
            seconds = self._joined(sent.name, sent.axes, payloads)
            return seconds * (1.0 - self.hardware.hidden_fraction(form.purpose))
        sizes = tuple(t.shape.sizes for t in types)
        done = form.quantities.get(sizes)
        if done is None:
            done = form.quantities[sizes] = self._done(form.unit, form.values, types)
        return sum(map(self._priced, done))

    def _piece(self, placed: Placed) -> TensorType:
        """The type of a device's piece of a value."""
        found = self._pieces.get(placed)
        if found is None:
            found = local_type(placed.shape, placed.dtype, placed.splits, self.placement.mesh)
            self._pieces[placed] = found
        return found

    def _done(self, unit: Unit, values: Sequence[int], types: Sequence[TensorType]) -> tuple[Quantity, ...]:
        """What a unit does where these of its values have pieces of these types."""
        local = dict(zip(values, types, strict=True)).__getitem__
        if isinstance(unit, Group | Lone):
            return tuple(of_kernel(kernel, local) for kernel in unit.kernels(local))
        if isinstance(unit, Loop):
            return tuple(self._stacked(unit, type) for type in types)
        assert isinstance(unit, Local)
        return (of_local(unit, local),)

    def seconds(self, program: Program, again: bool = False) -> float:
        """Seconds of the instructions alone: the price of a step without its fixed part; `again` as in
        `lines`."""
        return sum(line.exposed * line.times for line in self.lines(program, again))

    def fixed_seconds(self, program: Program) -> float:
        """What a step takes under every layout, priced call by call."""
        return self._calls.of_step(program) if self.by_call else 0.0

    def local(self, program: Program, instr: Local, times: float) -> Line:
        quantity = of_local(instr, program.local)
        seconds, opened = self._calls.of(program, instr) if self.by_call else (None, None)
        if seconds is None:
            seconds = self._priced(quantity)
        return Line(
            instr.name,
            "",
            instr.origin,
            quantity.op_class,
            times,
            seconds,
            seconds,
            quantity.flops,
            quantity.bytes,
            opened=opened or quantity,
        )

    def kernel(self, program: Program, kernel: Kernel, times: float) -> Line:
        """A line for operations that run as one."""
        first = kernel.product or kernel.instrs[0]
        quantity = of_kernel(kernel, program.local)
        seconds = self._priced(quantity)
        flops = sum(of_local(instr, program.local).flops for instr in kernel.ends)
        text = " + ".join(instr.name for instr in kernel.instrs) if len(kernel.instrs) > 1 else ""
        return Line(
            first.name,
            text,
            first.origin,
            quantity.op_class,
            times,
            seconds,
            seconds,
            flops,
            quantity.bytes,
            opened=quantity,
        )

    def _priced(self, quantity: Quantity) -> float:
        seconds = self._compute.get(quantity)
        if seconds is None:
            seconds = self._compute[quantity] = compute_seconds(self.hardware, quantity, self.devices)
        return seconds

    def stacking(self, program: Program, loop: Loop, times: float) -> Iterable[Line]:
        """A loop writes what it stacks; reading a part back is a view.

        An engine of one process keeps parts, and joins them only for readers other than loops: the update,
        of gradients. XLA first sets a stack to zero that it cannot prove to be written as a whole: from the
        last to the first.
        """
        if self.in_parts and loop.origin.phase == "forward":
            return
        for stack in loop.stacked:
            if self.hardware.streams_attention and streamed(program, stack.outer):
                continue
            written = self._stacked(loop, program.local(stack.outer))
            seconds, size = self._priced(written), written.bytes
            text = loop.text()
            yield Line("stack", text, loop.origin, "data", times, seconds, seconds, 0.0, size, opened=written)

    def _stacked(self, loop: Loop, stack: TensorType) -> Quantity:
        zeroed = self.fuses and loop.reverse
        return of_stack(stack, 2 if self.by_call or zeroed else 1, zeroed)

    def _sums(self, program: Program, instr: AllReduce, times: float, stacks: dict[int, int]) -> Line:
        """An all-reduce whose values, and the parts of stacked ones, are summed one by one."""
        payloads: list[int] = []
        for i in instr.inputs:
            parts = stacks.get(i, 1)
            payload = program.values[i].local_bytes(program.mesh)
            payloads += [max(1, payload // parts)] * parts
        seconds = sum(self._message(instr.name, instr.axes, payload) for payload in payloads)
        return Line(
            instr.name,
            instr.text(),
            instr.origin,
            instr.name,
            times,
            seconds,
            seconds,
            axes=instr.axes,
            sent=program.wire_bytes(instr),
            opened=Sent(tuple(payloads), together=False),
        )

    def collective(self, program: Program, instr: Collective, times: float, purpose: str) -> Line:
        """A line for one collective; `purpose` is its class (`costmodels.pricing.overlap`)."""
        kind = instr.name
        sizes = [program.values[i].local_bytes(program.mesh) for i in instr.inputs]
        payloads = self._payloads(instr, sizes)
        seconds = self._joined(kind, instr.axes, payloads)
        exposed = seconds * (1.0 - self.hardware.hidden_fraction(purpose))
        sent, text = program.wire_bytes(instr), instr.text()
        return Line(
            kind,
            text,
            instr.origin,
            kind,
            times,
            seconds,
            exposed,
            axes=instr.axes,
            sent=sent,
            purpose=purpose,
            opened=Sent(tuple(payloads)),
        )

    def _payloads(self, instr: Collective, sizes: list[int]) -> list[int]:
        """Bytes that a collective is priced by; `sizes` are those of its pieces."""
        if not isinstance(instr, Permute) or not isinstance(self.hardware.topology, Torus):
            return sizes
        # Pieces that go further than to the next chip share links.
        crossings = max(1, instr.crossings(self.placement.mesh.group_size(instr.axes)))
        return [size * crossings for size in sizes]

    def message_seconds(self, axes: Axes, payload: int) -> float:
        """Exposed seconds of one sum of gradients whose input on a device has `payload` bytes."""
        hidden = self.hardware.hidden_fraction(GRADIENT)
        return self._message("all_reduce", axes, payload) * (1.0 - hidden)

    def _joined(self, kind: str, axes: Axes, payloads: Sequence[int]) -> float:
        """Values that travel together pay for their bytes each, and for one latency (that of one byte)
        together."""
        total = sum(self._message(kind, axes, payload) for payload in payloads)
        return total - (len(payloads) - 1) * self._message(kind, axes, 1)

    def _message(self, kind: str, axes: Axes, payload: int) -> float:
        key = (kind, axes, payload)
        seconds = self._collective.get(key)
        if seconds is None:
            size = full_bytes(kind, payload, self.placement.mesh.group_size(axes))
            seconds = collective_seconds(self.hardware, self.placement, kind, axes, size)
            self._collective[key] = seconds
        return seconds


def _stacks(program: Program) -> dict[int, int]:
    """Values that loops stack -> the number of their parts."""
    loops = (instr for instr, _ in program.walk() if isinstance(instr, Loop))
    return {stack.outer: loop.dim.size for loop in loops for stack in loop.stacked}


def pricer(hardware: Hardware, program_or_mesh: object, placement: Placement | None = None) -> Pricer:
    """A Pricer for a mesh (or the mesh of a program); `placement` defaults to the hardware's best."""
    mesh = getattr(program_or_mesh, "mesh", program_or_mesh)
    return Pricer(hardware, placement or place(hardware, mesh))  # type: ignore[arg-type]


def price(program: Program, hardware: Hardware, placement: Placement | None = None) -> Cost:
    """The price of one step of `program` on `hardware`."""
    return pricer(hardware, program, placement).cost(program)
