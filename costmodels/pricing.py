"""The price of a program: quantities of every instruction, then seconds on a piece of hardware.

(1) compute seconds        = sum over local instructions of times * t(flops, bytes)        `costmodels.compute`
(2) communication seconds  = sum over collectives of times * t(kind, axes, bytes)          `costmodels.collectives`
(3) exposed communication  = sum over collectives of (1 - hidden fraction of its kind) * its seconds
(4) step seconds           = compute + exposed communication

Quantities add up over instructions; seconds come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from costmodels.collectives import collective_seconds, full_bytes
from costmodels.compute import Quantity, compute_seconds
from costmodels.hardware import Hardware
from costmodels.topology import Placement, place
from mesh_tf_core.layout import Axes
from mesh_tf_core.program import Collective, Local, Loop, Origin, Program


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction's share of the price.

    Attributes:
      times: how often it runs in a step; every other number is of one run on one device.
      seconds: all of it, hidden or not.
      exposed: seconds that the step waits for.
      flops, bytes: of computation.
      axes, sent: of a collective: its mesh axes, and the bytes a device sends.
    """

    name: str
    text: str
    origin: Origin
    kind: str
    times: int
    seconds: float
    exposed: float
    flops: float = 0.0
    bytes: float = 0.0
    axes: Axes = ()
    sent: float = 0.0

    @property
    def is_communication(self) -> bool:
        return bool(self.axes)


@dataclass(frozen=True)
class Cost:
    """The price of a program on hardware; all numbers of one step, per device."""

    lines: tuple[Line, ...]

    def _total(self, value: Callable[[Line], float], communication: bool) -> float:
        return sum(value(x) * x.times for x in self.lines if x.is_communication == communication)

    @cached_property
    def compute_seconds(self) -> float:
        return self._total(lambda x: x.seconds, False)

    @cached_property
    def communication_seconds(self) -> float:
        return self._total(lambda x: x.seconds, True)

    @cached_property
    def exposed_communication_seconds(self) -> float:
        return self._total(lambda x: x.exposed, True)

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.exposed_communication_seconds

    @cached_property
    def flops(self) -> float:
        return self._total(lambda x: x.flops, False)

    def communication_bytes(self) -> dict[str, float]:
        """Bytes sent, by mesh axes joined with '+'."""
        out: dict[str, float] = {}
        for x in self.lines:
            if x.is_communication:
                key = "+".join(x.axes)
                out[key] = out.get(key, 0.0) + x.sent * x.times
        return out

    def by(self, key: Callable[[Line], str]) -> dict[str, float]:
        """Exposed seconds grouped by any property of the lines, the largest first."""
        out: dict[str, float] = {}
        for x in self.lines:
            out[key(x)] = out.get(key(x), 0.0) + x.exposed * x.times
        return dict(sorted(out.items(), key=lambda item: -item[1]))


@dataclass
class Pricer:
    """Prices programs of one mesh on one piece of hardware, remembering what it has priced."""

    hardware: Hardware
    placement: Placement
    _compute: dict[Quantity, float] = field(default_factory=dict)
    _collective: dict[tuple[str, Axes, int], float] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return self.placement.mesh.devices

    def lines(self, program: Program) -> Iterable[Line]:
        """One line per instruction that takes time."""
        for instr, times in program.walk():
            if isinstance(instr, Local) and not instr.op.free:
                yield self.local(program, instr, times)
            elif isinstance(instr, Collective):
                yield self.collective(program, instr, times)
            elif isinstance(instr, Loop) and instr.stacked:
                yield self.stacking(program, instr, times)

    def cost(self, program: Program) -> Cost:
        return Cost(tuple(self.lines(program)))

    def seconds(self, program: Program) -> float:
        """Step seconds alone."""
        return sum(line.exposed * line.times for line in self.lines(program))

    def local(self, program: Program, instr: Local, times: int) -> Line:
        quantity = quantity_of(program, instr)
        seconds = self._compute.get(quantity)
        if seconds is None:
            seconds = self._compute[quantity] = compute_seconds(self.hardware, quantity, self.devices)
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
        )

    def stacking(self, program: Program, loop: Loop, times: int) -> Line:
        """A loop writes what it stacks; reading a part back is a view."""
        size = float(sum(program.values[o].local_bytes(program.mesh) for _, o in loop.stacked))
        quantity = Quantity(0.0, size, "data", program.values[loop.stacked[0][1]].dtype)
        seconds = compute_seconds(self.hardware, quantity, self.devices)
        return Line("stack", loop.text(), loop.origin, "data", times, seconds, seconds, 0.0, size)

    def collective(self, program: Program, instr: Collective, times: int) -> Line:
        payload = sum(program.values[i].local_bytes(program.mesh) for i in instr.inputs)
        kind = instr.name
        key = (kind, instr.axes, payload)
        seconds = self._collective.get(key)
        if seconds is None:
            size = full_bytes(kind, payload, program.mesh.group_size(instr.axes))
            seconds = collective_seconds(self.hardware, self.placement, kind, instr.axes, size)
            self._collective[key] = seconds
        exposed = seconds * (1.0 - self.hardware.hidden_fraction(kind))
        sent = program.wire_bytes(instr)
        return Line(
            kind, instr.text(), instr.origin, kind, times, seconds, exposed, axes=instr.axes, sent=sent
        )

    def message_seconds(self, kind: str, axes: Axes, payload: int) -> float:
        """Exposed seconds of one collective whose input on a device has `payload` bytes."""
        size = full_bytes(kind, payload, self.placement.mesh.group_size(axes))
        seconds = collective_seconds(self.hardware, self.placement, kind, axes, size)
        return seconds * (1.0 - self.hardware.hidden_fraction(kind))


def quantity_of(program: Program, instr: Local) -> Quantity:
    """What one device does in a local instruction: FLOPs of the operation, bytes of its operands and results."""
    inputs = [program.local(i) for i in instr.inputs]
    outputs = [program.local(o) for o in instr.outputs]
    moved = float(sum(t.bytes for t in (*inputs, *outputs)))
    dims = instr.op.contraction(*inputs)
    matmul = (dims[1], dims[2], dims[3], dims[0]) if dims else None
    kind = instr.op.kind
    if kind == "matmul" and (matmul is None or min(matmul[:3]) == 1):
        kind, matmul = "elementwise", None
    dtype = (inputs or outputs)[0].dtype
    return Quantity(float(instr.op.flops(*inputs)), moved, kind, dtype, matmul)


def pricer(hardware: Hardware, program_or_mesh: object, placement: Placement | None = None) -> Pricer:
    """A Pricer for a mesh (or the mesh of a program); `placement` defaults to the hardware's best."""
    mesh = getattr(program_or_mesh, "mesh", program_or_mesh)
    return Pricer(hardware, placement or place(hardware, mesh))  # type: ignore[arg-type]


def price(program: Program, hardware: Hardware, placement: Placement | None = None) -> Cost:
    """The price of one step of `program` on `hardware`."""
    return pricer(hardware, program, placement).cost(program)


