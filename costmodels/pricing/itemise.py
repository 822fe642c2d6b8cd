"""From a program to its itemised cost (`costmodels.pricing.items`).

Items are kernels, collectives, transfers between a device and its host, and a loop's writes to stacks and
sums; reading a part of a stack is a view. The compiler's profile decides the kernels and the copies around
messages (`costmodels.pricing.compilers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from costmodels.hardware import Hardware
from costmodels.kernels.fused import Fused
from costmodels.kernels.groups import Group, VariableCast
from costmodels.kernels.partition import FusedKernel, Types
from costmodels.kernels.quantities import of_copy, of_local
from costmodels.network.collectives import full_bytes
from costmodels.pricing.compilers import Compiler, compiler_of
from costmodels.pricing.compilers.base import in_library
from costmodels.pricing.items import Between, Computed, Item, Sent, Transferred
from costmodels.pricing.overlap import Overlapped, awaited, overlapped
from costmodels.pricing.units import Find, Sending, Stack, Unit, first_of
from costmodels.stage_ends import schedule_of
from costmodels.stage_times import StageTimes
from mesh_tf_core.ir.instructions import GRADIENT, AllReduce, AllToAll, ReduceScatter
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Collective, Local, Loop, Permute, Program, Transfer, wire_bytes
from mesh_tf_core.ir.schedules import KINDS
from mesh_tf_core.lower.messages import SMALL_BYTES
from mesh_tf_core.ops.custom import LibraryKernels


@dataclass(frozen=True)
class Itemiser:
    """The division of programs into items. Itemisers that are equal make the same items.

    Attributes:
      compiler: the compiler of the kernels.
      overlaps: messages run at once with kernels.
    """

    compiler: Compiler
    overlaps: bool

    @classmethod
    def of(cls, hardware: Hardware) -> Itemiser:
        """As programs of some hardware are priced."""
        return cls(compiler_of(hardware), bool(hardware.overlap))

    def units(
        self, program: Program, kernels: Fused | None = None
    ) -> Iterator[tuple[Unit, float, float, Sending | None]]:
        """The units that are priced on their own, how often each runs, the share of its runs that counts, and
        the notes on collectives.

        Args:
          kernels: of the program, where they are known; else groups of kernels are one unit.
        """
        compiler = self.compiler
        stages = compiler.stages(program.outline)
        column = schedule_of(program.outline)
        pairs = column is not None and KINDS[column.schedule.kind].pairs

        def counts(unit: Unit, times: float) -> float:
            return share_of(unit, times, stages, program)

        timed = compiler.timed(program) if kernels is None else kernels.items
        at_once = overlapped(program, lambda i: compiler.carried(i, program.local)) if self.overlaps else {}
        parts = compiler.parts(program)
        for what, times in timed:
            if isinstance(what, Collective):
                rule = (self.overlaps and what.rule) or awaited(what, program, pairs)
                sending = compiler.sending(what, rule, parts)
                yield at_once.get(what.outputs[0], what), times, counts(what, times), sending
            elif isinstance(what, Loop) and not (compiler.calls and in_library(what)):
                for unit, often in (*compiler.stacked(program, what), *compiler.summed(program, what)):
                    yield unit, times * often, counts(unit, times * often), None
            elif isinstance(what, Transfer):
                yield at_once.get(what.outputs[0], what), times, counts(what, times), None
            elif isinstance(what, FusedKernel | Group | VariableCast) or (
                isinstance(what, Local) and compiler.computes(what)
            ):
                yield what, times, counts(what, times), None
        for instr, times in program.expected() if compiler.calls else ():
            if isinstance(instr, Local) and isinstance(instr.op, LibraryKernels):
                yield instr, times, counts(instr, times), None

    def items(
        self, unit: Unit, sending: Sending | None, find: Find, local: Types, mesh: Mesh
    ) -> tuple[Item, ...]:
        """The items of a unit, where its values have pieces of some types.

        Args:
          find: values by their ids; only instructions that are predicted op by op use it.
          local: types of their pieces.
        """
        if isinstance(unit, FusedKernel):
            return tuple(self.compiler.kernel(unit, local))
        if isinstance(unit, Group | VariableCast):
            return tuple(
                [item for kernel in unit.kernels(local) for item in self.compiler.kernel(kernel, local)]
            )
        if isinstance(unit, Local):
            return tuple(self.compiler.local(unit, find, local))
        if isinstance(unit, Stack):
            return (Computed(of_copy(local(unit.value), unit.passes, unit.through), 0.0),)
        message = unit.message if isinstance(unit, Overlapped) else unit
        between = between_of(unit, local) if isinstance(unit, Overlapped) else ()
        if isinstance(message, Transfer):
            updated = message.origin.phase == Phase.UPDATE
            return (Transferred(message.name, self.compiler.carried(message, local), between, updated),)
        assert sending is not None and isinstance(message, Collective)
        return self.of_collective(message, sending, [local(i) for i in message.inputs], mesh, between)

    def of_collective(
        self,
        instr: Collective,
        sending: Sending,
        types: Sequence[TensorType],
        mesh: Mesh,
        between: Between = (),
    ) -> tuple[Item, ...]:
        """The items of a collective; `types` are those of a device's inputs."""
        wide = self.compiler.rules.gradient_bytes if sending.purpose == GRADIENT else 0
        pieces = [int(t.shape.size * wide) if wide and t.shape.dims else t.bytes for t in types]
        n, payloads, experts = mesh.group_size(instr.axes), tuple(pieces), None
        if isinstance(instr, AllToAll) and (experts := types[0].shape.sparse) is not None:
            experts = experts.part(n if instr.split == experts.name else 1)
        if sending.parts:
            parted = zip(pieces, sending.parts, strict=True)
            payloads = tuple(part for size, count in parted for part in [max(1, size // count)] * count)
        most = max(payloads) if sending.parts else sum(pieces)
        sent = Sent(
            instr.name,
            instr.axes,
            payloads,
            wire_bytes(instr.name, sum(pieces), n),
            sending.purpose,
            not sending.parts,
            max(1, instr.crossings(n)) if isinstance(instr, Permute) else 1,
            sending.joins and full_bytes(instr.name, most, n) <= SMALL_BYTES,
            between,
            both_ways=isinstance(instr, Permute) and instr.both_ways,
            experts=experts,
        )
        return (sent, *self.compiler.copies(instr, types, mesh))


def share_of(unit: Unit, times: float, stages: StageTimes | None, program: Program) -> float:
    """The share of a unit's runs that counts; all of what waits behind the ticks, as sums of gradients do."""
    if stages is None:
        return 1.0
    gradients = program.outline.gradient_of
    if isinstance(unit, Stack):
        origin, value = unit.loop.origin, unit.value
    else:
        instr = first_of(unit)
        origin, value = instr.origin, instr.outputs[0]
    node = origin.node
    tensor = program.values[value].tensor
    sums = isinstance(unit, AllReduce | ReduceScatter) and (unit.rule == GRADIENT or tensor in gradients)
    if sums and times == 1:
        return 1.0
    if node not in stages.nodes:
        return stages.tensors.get(tensor, 1.0)
    if node in stages.again and origin.phase == Phase.RECOMPUTE:
        return stages.again[node]
    return stages.nodes[node] if times > 0.999 * stages.runs[node] else 1.0


def between_of(unit: Overlapped, local: Types) -> Between:
    """The work between a message's start and its done, where values have pieces of some types."""
    return tuple((Computed(of_local(instr, local), 0.0), part) for instr, part in unit.between)
