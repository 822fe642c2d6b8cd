"""The interface between the itemiser (`costmodels.pricing.itemise`) and a compiler profile, and the simplest
profile: every operation is a separate kernel, nothing is copied, and messages are those of the program."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from costmodels.hardware import Hardware
from costmodels.kernels.fused import Fused, fused, grouped
from costmodels.kernels.fusion import Fuses
from costmodels.kernels.groups import Group, VariableCast
from costmodels.kernels.partition import FusedKernel, Types
from costmodels.kernels.quantities import of_copy, of_kernel, of_local
from costmodels.liveness import MemoryRules
from costmodels.pricing.items import Called, Computed, Started
from costmodels.pricing.units import Find, PlacedValue, Sending, Stack, Unit
from costmodels.stage_times import StageTimes, stage_times
from mesh_tf_core.ir.blocks import Outline
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import Collective, Instr, Local, Loop, Program, Transfer
from mesh_tf_core.kernels.libraries import lacks_kernel
from mesh_tf_core.layers.recurrent import KERNEL
from mesh_tf_core.ops.attending import AnyAttention
from mesh_tf_core.ops.binary import Binary

OWNERS = {"tpu": "TPUs", "gpu": "NVIDIA GPUs"}


def in_library(instr: Instr) -> bool:
    """True if kernels of a library (`LibraryKernels`) do what an instruction stands for."""
    return KERNEL in instr.origin.scope.split("/")


def computed(kernel: FusedKernel, local: Types) -> Computed:
    """The item of a kernel."""
    flops = sum([of_local(instr, local).flops for instr in kernel.ends])
    return Computed(of_kernel(kernel, local), flops)


@dataclass(frozen=True)
class Compiler:
    """The division of programs into kernels. Profiles that are equal make the same items of a program.

    Attributes:
      name: in hardware files.
      memory: the rules of its memory, but for the numbers that a file gives (`holds`).
      apart: the values of one all-reduce are sent one by one.
      library: owner of the attention kernels that run ("tpu", "gpu"; `mesh_tf_core.kernels.libraries`);
        empty: not known.
      calls: programs have kernels of libraries for whole layers (`LibraryKernels`).
    """

    name: ClassVar[str] = "none"
    memory: ClassVar[MemoryRules] = MemoryRules()
    apart: ClassVar[bool] = False
    library: ClassVar[str] = ""
    calls: ClassVar[bool] = False
    holds: tuple[tuple[str, float], ...] = field(default=(), kw_only=True)

    @property
    def rules(self) -> MemoryRules:
        """The rules of its memory."""
        return replace(self.memory, **dict(self.holds))  # type: ignore[arg-type]

    @classmethod
    def of(cls, hardware: Hardware) -> Compiler:
        """The profile with the facts of a machine that it needs."""
        return cls()

    def lacking(self, program: Program) -> Iterator[str]:
        """One sentence for every reason why attention is priced as a library's kernel although no library has
        one for it (`mesh_tf_core.kernels.libraries`), in order; none if the libraries are not known."""
        found: dict[str, dict[str, None]] = {}
        every = program.every(Local) if self.library else ()
        for instr, op in ((i, i.op) for i in every if isinstance(i.op, AnyAttention)):
            if reason := lacks_kernel(op.laid(*map(program.local, instr.inputs)), self.library):
                found.setdefault(reason, {})[instr.origin.scope] = None
        for reason, scopes in found.items():
            where = f"{', '.join([*scopes][:3])}{', ...' * (len(scopes) > 3)}"
            what = f"no library kernel on {OWNERS[self.library]} supports attention with {reason} ({where})"
            yield f"{what}, so it runs in blocks of logits and takes longer than predicted, as by a kernel"

    # -- what is priced on its own ---------------------------------------------------------------------------

    def kernels(self, program: Program) -> Fused | None:
        """The kernels of a program; None where none are made."""
        fuses = self.memory.fuses
        return None if fuses is Fuses.NONE else fused(program, fuses)

    def timed(self, program: Program) -> Iterable[tuple[Instr | Group | VariableCast, float]]:
        """The instructions of a program, or the groups of kernels that they fall into, each with how often
        it runs."""
        fuses = self.memory.fuses
        return program.expected() if fuses is Fuses.NONE else grouped(program, fuses)

    def computes(self, instr: Local) -> bool:
        """True if an instruction that no kernel has taken is one itself."""
        return not instr.op.free

    def stacked(self, program: Program, loop: Loop) -> Iterator[tuple[Unit, float]]:
        """The priced writes of the stacks of a loop, each with how often it runs for one run of the loop."""
        for inner, stack in loop.stacked:
            if stack not in program.added and not program.values[stack].host:
                whole, share = program.share(loop, stack)
                yield self.stack(loop, inner, whole), 1.0 if whole == stack else share

    def stack(self, loop: Loop, inner: int, stack: int) -> Stack:
        """The writes of a loop to one stack, whose parts are `inner`."""
        return Stack(loop, stack)

    def width(self, program: Program, sum: int) -> float:
        """Bytes of an element of a sum of gradients / those that the program has."""
        wide = self.rules.gradient_bytes
        return wide / itemsize(program.values[sum].dtype) if wide else 1.0

    def summed(self, program: Program, loop: Loop) -> Iterator[tuple[Unit, float]]:
        """The additions of a loop to its sums, and to parts of those of the surrounding loop, as
        `stacked`."""
        terms = [s for s in loop.summed if s.inner not in program.added]
        parts = [s for s in loop.stacked if s.outer in program.added]
        for term, _ in (*terms, *parts):
            yield Local((term, term), (term,), loop.origin, Binary("add")), loop.times

    # -- kernels ---------------------------------------------------------------------------------------------

    def kernel(self, kernel: FusedKernel, local: Types) -> Iterator[Computed]:
        """The item of a kernel, if it is one: an operation on statistics alone is part of the kernel that
        reads them."""
        if not kernel.between:
            yield computed(kernel, local)

    def local(self, instr: Local, find: Find, local: Types) -> Iterator[Computed | Called]:
        """The item of an instruction that runs as a separate kernel, if it does."""
        quantity = of_local(instr, local)
        yield Computed(quantity, quantity.flops)

    def known_by(self, values: Sequence[PlacedValue]) -> Hashable:
        """The key that determines the items of a unit besides the types of its shards."""
        return None

    def stages(self, graph: Outline) -> StageTimes | None:
        """The share of the work that counts, where each stage of a pipeline is a program of its own."""
        return stage_times(graph) if self.memory.stage_programs else None

    def start(self, program: Program) -> Started | None:
        """The fixed seconds of a step under every layout; None where they are unknown."""
        return None

    # -- messages --------------------------------------------------------------------------------------------

    def parts(self, program: Program) -> Mapping[int, int]:
        """Stacks whose parts are stored separately -> number of their parts."""
        return {}

    def sending(self, instr: Collective, purpose: str, parts: Mapping[int, int]) -> Sending:
        """The form in which a collective is sent.

        Args:
          purpose: its rule (`costmodels.pricing.overlap`).
          parts: as of `parts`.
        """
        return Sending(purpose)

    def copies(
        self, instr: Collective, types: Sequence[TensorType], mesh: Mesh
    ) -> Iterator[Computed | Called]:
        """The kernels that copy a collective's result to a new layout in memory.

        Args:
          types: of the pieces that a device puts in.
        """
        yield from ()

    def carried(self, instr: Transfer, local: Types) -> float:
        """Bytes on the host link of a transfer."""
        return of_copy(local(instr.inputs[0]), 1, False).bytes
