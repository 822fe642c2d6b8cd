"""The project's own engine on TensorFlow, which calls array functions one by one.

(1) Where they were measured (`costmodels.pricing.op_by_op`), an instruction is its array functions; else
    every operation is a kernel.
(2) In one process the parts of a stack are stored separately, and are joined only for readers other than
loops: the update, of gradients. Values that travel together, and the parts of stacked ones, are summed one by
one.
    Between processes both are joined, as on other hardware.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from costmodels.hardware import Hardware
from costmodels.kernels.array_functions import narrow
from costmodels.kernels.calls import NoArrayFunctionError
from costmodels.kernels.partition import Types
from costmodels.kernels.quantities import of_local, quantity_of
from costmodels.pricing.compilers.base import Compiler
from costmodels.pricing.items import Called, Computed, Started
from costmodels.pricing.op_by_op import array_functions, is_measured
from costmodels.pricing.units import Find, PlacedValue, Sending, Stack, Unit, split_names, stays
from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ops.shape import SliceDim


@dataclass(frozen=True)
class LocalEngine(Compiler):
    """Its array functions were not measured."""

    name: ClassVar[str] = "local"

    @classmethod
    def of(cls, hardware: Hardware) -> Compiler:
        if not is_measured(hardware):
            return LocalEngine()
        return MeasuredLocalEngine() if hardware.devices_per_process is not None else OneProcess()


@dataclass(frozen=True)
class MeasuredLocalEngine(LocalEngine):
    """Several processes, rule (1)."""

    def stack(self, loop: ir.Loop, inner: int, stack: int) -> Stack:
        return Stack(loop, stack, 2)

    def local(self, instr: ir.Local, find: Find, local: Types) -> Iterator[Computed | Called]:
        quantity = of_local(instr, local)
        inputs, outputs = tuple(map(local, instr.inputs)), tuple(map(local, instr.outputs))
        split = split_names(map(find, (*instr.inputs, *instr.outputs)))
        found = Called(instr.op, inputs, outputs, split, stays(instr.origin.phase), quantity)
        try:
            array_functions(found)
        except NoArrayFunctionError as error:
            yield Computed(quantity, quantity.flops, str(error))
        else:
            yield found

    def known_by(self, values: Sequence[PlacedValue]) -> Hashable:
        return split_names(values)

    def start(self, program: ir.Program) -> Started | None:
        return Started(sum(isinstance(instr, ir.WriteVariable) for instr in program.code))


@dataclass(frozen=True)
class OneProcess(MeasuredLocalEngine):
    """All devices in one process, rule (2)."""

    apart: ClassVar[bool] = True

    def stacked(self, program: ir.Program, loop: ir.Loop) -> Iterator[tuple[Unit, float]]:
        if loop.origin.phase != Phase.FORWARD:
            yield from super().stacked(program, loop)

    def parts(self, program: ir.Program) -> Mapping[int, int]:
        loops = [*program.every(ir.Loop)]
        whole = frozenset[int]().union(*map(program.longer, loops))
        made = ((stack.outer, loop.dim.size) for loop in loops for stack in loop.stacked)
        return {outer: parts for outer, parts in made if outer not in whole}

    def sending(self, instr: ir.Collective, purpose: str, parts: Mapping[int, int]) -> Sending:
        if isinstance(instr, ir.AllReduce):
            return Sending("", tuple(parts.get(i, 1) for i in instr.inputs))
        return super().sending(instr, purpose, parts)

    def copies(
        self, instr: ir.Collective, types: Sequence[TensorType], mesh: Mesh
    ) -> Iterator[Computed | Called]:
        """The slices that a collective makes of narrow rows, one for each device of its group."""
        n = mesh.group_size(instr.axes)
        if not isinstance(instr, ir.ReduceScatter | ir.AllToAll) or n == 1:
            return
        name = instr.dim if isinstance(instr, ir.ReduceScatter) else instr.split
        for whole in types:
            dims = (Dim(d.name, d.size // n) if d.name == name else d for d in whole.shape)
            part = TensorType(Shape(dims), whole.dtype)
            if narrow(whole.shape.sizes, part.shape.sizes, part.dtype):
                op = SliceDim(name, 0, 1)
                quantity = quantity_of(op, (whole,), (part,))
                yield from [Called(op, (whole,), (part,), frozenset(), False, quantity)] * n
