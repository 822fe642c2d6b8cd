"""Compilers that make kernels of several operations, and further rules of XLA's back ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from costmodels.hardware import Hardware
from costmodels.kernels.fused import made_by_kernels
from costmodels.kernels.fusion import Fuses
from costmodels.kernels.partition import FusedKernel, Types
from costmodels.kernels.quantities import of_copy
from costmodels.liveness import MemoryRules
from costmodels.pricing.compilers.base import Compiler, computed
from costmodels.pricing.items import Computed
from costmodels.pricing.units import Sending, Stack, Unit
from mesh_tf_core.ir.instructions import GRADIENT, PARAMETER
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import AllGather, AllReduce, AllToAll, Collective, Local, Loop, Program, Transfer


@dataclass(frozen=True)
class Xla(Compiler):
    """XLA as far as all of its back ends agree: operations share kernels by the rules of
    `costmodels.kernels.fused`.

    (1) A stack that it cannot prove to be written as a whole, from the last part to the first, is set to zero
        before.
    (2) Additions to a loop's sum, or to a part of it (`Program.added`), read and write it in place: by the
    kernel that computes the term, else by a separate addition.
    """

    name: ClassVar[str] = "xla"
    memory: ClassVar[MemoryRules] = MemoryRules(fuses=Fuses.ALL)

    def stack(self, loop: Loop, inner: int, stack: int) -> Stack:
        return Stack(loop, stack, 1 + loop.reverse, loop.reverse)

    def summed(self, program: Program, loop: Loop) -> Iterator[tuple[Unit, float]]:
        made = made_by_kernels(loop)
        for term, total in loop.summed:
            if term not in program.added:
                yield Stack(loop, total, (1 if term in made else 3) * self.width(program, total)), loop.times
        for _, stack in loop.stacked:
            if stack in program.added:
                whole, share = program.share(loop, stack)
                yield Stack(loop, whole, 2 * self.width(program, whole)), share


@dataclass(frozen=True)
class Joining(Compiler):
    """A message of a weight that is stored split, or of its gradient, is sent with the others of its layer; a
    small one (a bias, a scale) therefore adds only its bytes, not a latency.

    Attributes:
      curves: collectives were measured, each alone, so each is priced alone.
    """

    curves: bool = False

    @classmethod
    def of(cls, hardware: Hardware) -> Compiler:
        return cls(bool(hardware.collective_curves))

    def sending(self, instr: Collective, purpose: str, parts: Mapping[int, int]) -> Sending:
        ahead = purpose in (GRADIENT, PARAMETER) and not isinstance(instr, AllReduce)
        apart = tuple(parts.get(i, 1) for i in instr.inputs) if ahead else ()
        return Sending(purpose, apart if any(n > 1 for n in apart) else (), ahead and not self.curves)


@dataclass(frozen=True)
class XlaTpu(Xla):
    """XLA for TPUs, as its compiler's programs and estimates show (`benchmarks/verify.py`).

    (1) Arrays are stored in tiles; transfers over the host link move whole tiles. (2) A separate kernel
    copies the result of a collective to its stack. (3) The result of an all-to-all is ordered by device: a
    separate kernel writes it in the order of its dimensions (copies around `lax.all_to_all`). (4) A product
    reads a part of an operand (`Op.cuts`) in place, and writes its result in place (v5e:2x4,
    chunks of scatters and gathers, 2026-11-24). (5) Operations on statistics only are a separate kernel. (6)
    Each message of a weight or of its gradient is sent alone.
    """

    name: ClassVar[str] = "xla-tpu"
    memory: ClassVar[MemoryRules] = MemoryRules(fuses=Fuses.ALL, tiles=True)
    library: ClassVar[str] = "tpu"

    def computes(self, instr: Local) -> bool:
        return super().computes(instr) and not instr.op.cuts

    def stack(self, loop: Loop, inner: int, stack: int) -> Stack:
        copied = inner in _moved(loop)
        return Stack(loop, stack, 1 + loop.reverse + copied, loop.reverse or copied)

    def kernel(self, kernel: FusedKernel, local: Types) -> Iterator[Computed]:
        yield computed(kernel, local)

    def copies(self, instr: Collective, types: Sequence[TensorType], mesh: Mesh) -> Iterator[Computed]:
        if isinstance(instr, AllToAll) and mesh.group_size(instr.axes) > 1:
            yield from [Computed(of_copy(t, 2), 0.0) for t in types]

    def carried(self, instr: Transfer, local: Types) -> float:
        moved = of_copy(local(instr.inputs[0]), 1, False)
        return moved.tiled[0] if moved.tiled else moved.bytes


def _moved(loop: Loop) -> frozenset[int]:
    """Values of a loop's body that collectives make, under all their names: no kernel writes them."""
    found: set[int] = set()
    for instr in loop.body:
        if isinstance(instr, Collective) or (
            isinstance(instr, Local) and instr.op.free and found.issuperset(instr.inputs[:1])
        ):
            found.update(instr.outputs)
    return frozenset(found)


@dataclass(frozen=True)
class XlaGpu(Joining, Xla):
    """XLA for GPUs: it joins small messages of weights up to 30 MiB (openxla/xla,
    xla/debug_options_flags.cc)."""

    name: ClassVar[str] = "xla-gpu"
    library: ClassVar[str] = "gpu"


@dataclass(frozen=True)
class XlaCpu(Xla):
    """XLA for virtual CPU devices: it gathers only along the outermost dimension, so a gather along another
    dimension is written once more, in the order of its dimensions (`benchmarks/cpu_jax.py`, `gathers`)."""

    name: ClassVar[str] = "xla-cpu"

    def copies(self, instr: Collective, types: Sequence[TensorType], mesh: Mesh) -> Iterator[Computed]:
        n = mesh.group_size(instr.axes)
        if not isinstance(instr, AllGather) or n == 1:
            return
        for t in types:
            if math.prod(t.shape.sizes[: t.shape.index(instr.dim)]) > 1:
                yield Computed(of_copy(t, 2 * n), 0.0)
