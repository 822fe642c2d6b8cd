"""From a program to its itemised cost (`costmodels.pricing.items`).

A kernel is an item, and so are a collective, what goes between a device and its host, and what loops write to
their stacks and sums; reading a part of a stack back is a view. Which kernels there are, and what is copied
around messages, says the compiler's profile (`costmodels.pricing.compilers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from costmodels.hardware import Hardware
from costmodels.kernels.fused import Fused
from costmodels.kernels.groups import Group, VariableCast
from costmodels.kernels.partition import Kernel, Types
from costmodels.kernels.quantities import of_copy, of_local
from costmodels.network.collectives import full_bytes
from costmodels.pricing.compilers import Compiler, compiler_of
from costmodels.pricing.items import Computed, Item, Sent, Transferred
from costmodels.pricing.overlap import ACTIVATION, RING, Beside, beside, beside_loops, classes
from costmodels.pricing.units import Find, Sending, Stack, Unit
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import Collective, Local, Loop, Permute, Program, Transfer, wire_bytes
from mesh_tf_core.lower.combine import SMALL_BYTES


@dataclass(frozen=True)
class Itemiser:
    """How programs fall into items. Itemisers that are equal make the same items.

    Attributes:
      compiler: whose kernels they are.
      overlaps: the class of a collective matters.
    """

    compiler: Compiler
    overlaps: bool

    @classmethod
    def of(cls, hardware: Hardware) -> Itemiser:
        """As programs of some hardware are priced."""
        return cls(compiler_of(hardware), bool(hardware.overlap))

    def units(
        self, program: Program, again: bool = False, kernels: Fused | None = None
    ) -> Iterator[tuple[Unit, float, Sending | None]]:
        """What is priced on its own, how often it runs, and what is to know of a collective.

        Args:
          again: see `Compiler.kernels`.
          kernels: of the program, where they are known; else groups of kernels are one unit.
        """
        compiler = self.compiler
        timed = compiler.timed(program, again) if kernels is None else kernels.items
        purposes = classes(program) if self.overlaps else {}
        rings = beside(program) if self.overlaps else {}
        if self.overlaps:
            rings |= beside_loops(program, lambda instr: compiler.carried(instr, program.local))
        parts = compiler.parts(program)
        for what, times in timed:
            if isinstance(what, Collective):
                sending = compiler.sending(what, purposes.get(what.outputs[0], ACTIVATION), parts)
                yield rings.get(what.outputs[0], what), times, sending
            elif isinstance(what, Loop):
                for unit, often in (*compiler.stacked(program, what), *compiler.summed(program, what)):
                    yield unit, times * often, None
            elif isinstance(what, Transfer):
                yield rings.get(what.outputs[0], what), times, None
            elif isinstance(what, Kernel | Group | VariableCast) or (
                isinstance(what, Local) and compiler.computes(what)
            ):
                yield what, times, None

    def items(
        self, unit: Unit, sending: Sending | None, find: Find, local: Types, mesh: Mesh
    ) -> tuple[Item, ...]:
        """The items of a unit, where its values have pieces of some types.

        Args:
          find: values by their ids; only an instruction that is priced op by op asks.
          local: types of their pieces.
        """
        if isinstance(unit, Kernel):
            return tuple(self.compiler.kernel(unit, local))
        if isinstance(unit, Group | VariableCast):
            return tuple(
                [item for kernel in unit.kernels(local) for item in self.compiler.kernel(kernel, local)]
            )
        if isinstance(unit, Local):
            return tuple(self.compiler.local(unit, find, local))
        if isinstance(unit, Stack):
            return (Computed(of_copy(local(unit.value), unit.passes, unit.through), 0.0),)
        if isinstance(unit, Transfer):
            return (Transferred(unit.name, self.compiler.carried(unit, local)),)
        found = [Computed(of_local(k, local), 0.0) for k in unit.kernels] if isinstance(unit, Beside) else []
        if isinstance(unit, Beside) and isinstance(unit.instr, Transfer):
            (item,) = self.items(unit.instr, None, find, local, mesh)
            assert isinstance(item, Transferred)
            return (replace(item, under=tuple(found), share=unit.share),)
        assert sending is not None
        if isinstance(unit, Beside):
            return self.of_ring(unit, sending, [local(i) for i in unit.instr.inputs], mesh, found)
        return self.of_collective(unit, sending, [local(i) for i in unit.inputs], mesh)

    def of_collective(
        self, instr: Collective, sending: Sending, types: Sequence[TensorType], mesh: Mesh
    ) -> tuple[Item, ...]:
        """The items of a collective; `types` are those of what a device puts in."""
        sent = _sent(instr, sending, [t.bytes for t in types], mesh)
        return (sent, *self.compiler.copies(instr, types, mesh))

    def of_ring(
        self,
        unit: Beside,
        sending: Sending,
        types: Sequence[TensorType],
        mesh: Mesh,
        under: Sequence[Computed],
    ) -> tuple[Item, ...]:
        """The items of a message that runs beside kernels."""
        assert isinstance(unit.instr, Collective)
        sent, *more = self.of_collective(unit.instr, sending, types, mesh)
        assert isinstance(sent, Sent)
        return replace(sent, purpose=RING, under=tuple(under), share=unit.share), *more


def _sent(instr: Collective, sending: Sending, pieces: Sequence[int], mesh: Mesh) -> Sent:
    """The message of a collective; `pieces` are the bytes of what a device puts in."""
    n, payloads = mesh.group_size(instr.axes), tuple(pieces)
    if sending.parts:
        parted = zip(pieces, sending.parts, strict=True)
        payloads = tuple(part for size, count in parted for part in [max(1, size // count)] * count)
    small = full_bytes(instr.name, sum(pieces), n) <= SMALL_BYTES
    return Sent(
        instr.name,
        instr.axes,
        payloads,
        wire_bytes(instr.name, sum(pieces), n),
        sending.purpose,
        not sending.parts,
        max(1, instr.crossings(n)) if isinstance(instr, Permute) else 1,
        sending.joins and small,
        both_ways=isinstance(instr, Permute) and instr.both_ways,
    )
