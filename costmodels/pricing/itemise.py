"""From a program to its itemised cost (`costmodels.pricing.items`).

(1) Hardware whose compiler fuses: one item for each kernel (`costmodels.kernels.fused`). Other hardware:
    one for each instruction.
(2) A collective is an item, and so is every stack that a loop writes; reading a part back is a view. XLA
    first sets a stack to zero that it cannot prove to be written as a whole: from the last part to the first.
    On TPUs, what a collective made is copied to its stack by a kernel of its own.
    What is added to a loop's sum, or to a part of it (`Program.added`), is read and written there: by the
    kernel that makes the term, else by an addition of its own.
(3) Op by op (`costmodels.pricing.op_by_op`): an instruction is its array functions. In one process the parts
    of a stack stay apart, and are joined only for readers other than loops: the update, of gradients. Values
    that travel together, and the parts of stacked ones, are summed one by one. Between processes both are
    joined, as on other hardware.
(4) On GPUs a weight that is stored split is gathered, and its gradient scattered, together with the others of
    its layer: XLA joins such messages up to 30 MiB (openxla/xla, xla/debug_options_flags.cc), PyTorch's FSDP
    lays a layer's weights end to end (Zhao et al. 2023, section 3.2). So a small one (a bias, a scale) pays
    for its bytes, not for a message of its own. The TPU compiler sends each alone (`benchmarks/verify.py`).
(5) On TPUs, what an all-to-all brings lies device by device: a kernel of its own writes it in the order of
    its dimensions (XLA's copies around `lax.all_to_all`, `benchmarks/verify.py`).
(6) On virtual CPU devices XLA gathers along the outermost dimension alone: what is gathered along another is
    written once more, in the order of its dimensions (`benchmarks/cpu_jax.py`, `gathers`).
(7) What goes between a device and its host is an item: on TPUs all of the tiles that it lies in.
(8) A host that launches kernels (`Hardware.host_counts`) counts itself: an operation on single whole numbers
    alone is no item. So PyTorch counts layers and microbatches in Python, and hands a dropout's seed and
    offset to its kernel as arguments (pytorch/pytorch aten/src/ATen/cuda/CUDAGeneratorImpl.cpp @03e68c4b).
(9) On TPUs a product reads a part of an operand (`Op.cuts`) where it lies, and writes its result in place:
    the compiler puts the slice, and the writing, into the product's kernel (v5e:2x4, chunks of scatters and
    gathers, 2026-11-24). Elsewhere they are copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from costmodels.hardware import Cluster, Hardware, SharedMemory
from costmodels.kernels.array_functions import narrow
from costmodels.kernels.calls import NoArrayFunctionError
from costmodels.kernels.fused import Fused, fused, grouped, made_by_kernels
from costmodels.kernels.groups import Group, VariableCast
from costmodels.kernels.partition import Kernel, Types
from costmodels.kernels.quantities import of_copy, of_kernel, of_local, quantity_of
from costmodels.network.collectives import full_bytes
from costmodels.pricing.items import Called, Computed, Item, Sent, Started, Transferred
from costmodels.pricing.op_by_op import array_functions, is_measured
from costmodels.pricing.overlap import ACTIVATION, RING, Beside, beside, beside_loops, classes
from costmodels.pricing.units import Find, Sending, Stack, Unit, split_names, stays
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Instr,
    Local,
    Loop,
    Permute,
    Program,
    ReduceScatter,
    Transfer,
    WriteVariable,
    wire_bytes,
)
from mesh_tf_core.lower.combine import SMALL_BYTES
from mesh_tf_core.ops.binary import Binary
from mesh_tf_core.ops.shape import SliceDim


@dataclass(frozen=True)
class Itemiser:
    """How programs fall into items. Itemisers that are equal make the same items.

    Attributes:
      op_by_op: instructions are priced as the local engine runs them, rule (3).
      in_parts: that engine is one process.
      fuses: operations are priced as the kernels that a compiler makes of them.
      overlaps: the class of a collective matters.
      tiles: arrays lie in tiles.
      joins: small messages of weights and of their gradients travel with large ones, rule (4).
      copies: arrays are laid out anew by kernels of their own, rules (2) and (5): so the TPU compiler
        does it, and nobody has looked at others.
      reorders: what is gathered along an inner dimension is laid out anew, rule (6).
      counted: single whole numbers are the host's, rule (8).
    """

    op_by_op: bool
    in_parts: bool
    fuses: bool
    overlaps: bool
    tiles: bool = False
    joins: bool = False
    copies: bool = False
    reorders: bool = False
    counted: bool = False

    @classmethod
    def of(cls, hardware: Hardware) -> Itemiser:
        """As programs of some hardware are priced."""
        op_by_op = is_measured(hardware)
        return cls(
            op_by_op,
            op_by_op and hardware.devices_per_process is None,
            hardware.fuses and not op_by_op,
            bool(hardware.overlap),
            hardware.tiles and not op_by_op,
            isinstance(hardware.topology, Cluster) and not hardware.collective_curves,
            hardware.compiled and hardware.tiles and not op_by_op,
            hardware.compiled and isinstance(hardware.topology, SharedMemory) and not op_by_op,
            hardware.host_counts and not op_by_op,
        )

    def kernels(self, program: Program, again: bool = False) -> Fused | None:
        """The kernels of a program; None where none are made.

        Args:
          again: it is part of a loop's body that runs again for backward.
        """
        return fused(program, again) if self.fuses else None

    def units(
        self, program: Program, again: bool = False, kernels: Fused | None = None
    ) -> Iterator[tuple[Unit, float, Sending | None]]:
        """What is priced on its own, how often it runs, and what is to know of a collective.

        Args:
          again: see `kernels`.
          kernels: of the program, where they are known; else groups of kernels are one unit.
        """
        timed = self._timed(program, again) if kernels is None else kernels.items
        purposes = classes(program) if self.overlaps else {}
        rings = beside(program) if self.overlaps else {}
        if self.overlaps:
            rings |= beside_loops(program, lambda instr: self._carried(instr, program.local))
        stacks = _stacks(program) if self.in_parts else {}
        for what, times in timed:
            if isinstance(what, Collective):
                if self.in_parts and isinstance(what, AllReduce):
                    sending = Sending("", tuple(stacks.get(i, 1) for i in what.inputs))
                else:
                    purpose = purposes.get(what.outputs[0], ACTIVATION)
                    joins = self.joins and purpose != ACTIVATION and not isinstance(what, AllReduce)
                    sending = Sending(purpose, joins=joins)
                yield rings.get(what.outputs[0], what), times, sending
            elif isinstance(what, Loop):
                for unit, often in (*self._stacked(program, what), *self._added(program, what)):
                    yield unit, times * often, None
            elif isinstance(what, Transfer):
                yield rings.get(what.outputs[0], what), times, None
            elif isinstance(what, Kernel | Group | VariableCast) or (
                isinstance(what, Local) and not what.op.free and not (self.copies and what.op.cuts)
            ):
                yield what, times, None

    def _timed(self, program: Program, again: bool) -> Iterable[tuple[Instr | Group | VariableCast, float]]:
        return grouped(program, again) if self.fuses else program.expected()

    def _stacked(self, program: Program, loop: Loop) -> Iterator[tuple[Unit, float]]:
        """The stacks that a loop writes."""
        if self.in_parts and loop.origin.phase == "forward":
            return
        zeroed = self.fuses and loop.reverse
        moved = _moved(loop) if self.copies else frozenset()
        for inner, stack in loop.stacked:
            if stack not in program.added and not program.values[stack].host:
                copied = inner in moved
                passes = 2 if self.op_by_op else 1 + zeroed + copied
                yield Stack(loop, stack, passes, zeroed or copied), 1.0

    def _added(self, program: Program, loop: Loop) -> Iterator[tuple[Unit, float]]:
        """What a loop adds to its sums, and to parts of those of the loop around."""
        terms = [s for s in loop.summed if s.inner not in program.added]
        parts = [s for s in loop.stacked if s.outer in program.added]
        if self.fuses:
            made = made_by_kernels(loop)
            for term, total in terms:
                yield Stack(loop, total, 1 if term in made else 3), loop.times
            for _, stack in parts:
                yield Stack(loop, stack, 2), loop.dim.size / program.values[stack].shape.sizes[0]
        else:
            for term, _ in (*terms, *parts):
                yield Local((term, term), (term,), loop.origin, Binary("add")), loop.times

    def items(
        self, unit: Unit, sending: Sending | None, find: Find, local: Types, mesh: Mesh
    ) -> tuple[Item, ...]:
        """The items of a unit, where its values have pieces of some types.

        Args:
          find: values by their ids; only an instruction that is priced op by op asks.
          local: types of their pieces.
        """
        if isinstance(unit, Kernel):
            return tuple(self._of_kernel(unit, local))
        if isinstance(unit, Group | VariableCast):
            return tuple([item for kernel in unit.kernels(local) for item in self._of_kernel(kernel, local)])
        if isinstance(unit, Local):
            return () if self._is_counted(unit, local) else (self._of_local(unit, find, local),)
        if isinstance(unit, Stack):
            return (Computed(of_copy(local(unit.value), unit.passes, unit.through), 0.0),)
        if isinstance(unit, Transfer):
            return (Transferred(unit.name, self._carried(unit, local)),)
        found = [Computed(of_local(k, local), 0.0) for k in unit.kernels] if isinstance(unit, Beside) else []
        if isinstance(unit, Beside) and isinstance(unit.instr, Transfer):
            (item,) = self.items(unit.instr, None, find, local, mesh)
            assert isinstance(item, Transferred)
            return (replace(item, under=tuple(found), share=unit.share),)
        assert sending is not None
        if isinstance(unit, Beside):
            return self.of_ring(unit, sending, [local(i) for i in unit.instr.inputs], mesh, found)
        return self.of_collective(unit, sending, [local(i) for i in unit.inputs], mesh)

    def _of_kernel(self, kernel: Kernel, local: Types) -> Iterator[Computed]:
        """Of a kernel. On GPUs what works on statistics alone is part of what reads them."""
        if all(self._is_counted(instr, local) for instr in kernel.instrs):
            return
        if not kernel.between or self.tiles:
            flops = sum([of_local(instr, local).flops for instr in kernel.ends])
            yield Computed(of_kernel(kernel, local), flops)

    def of_collective(
        self, instr: Collective, sending: Sending, types: Sequence[TensorType], mesh: Mesh
    ) -> tuple[Item, ...]:
        """The items of a collective; `types` are those of what a device puts in."""
        sent = _sent(instr, sending, [t.bytes for t in types], mesh)
        if self.in_parts:
            return (sent, *_cut(instr, types, mesh.group_size(instr.axes)))
        n = mesh.group_size(instr.axes)
        if self.copies and isinstance(instr, AllToAll) and n > 1:
            return (sent, *[Computed(of_copy(t, 2), 0.0) for t in types])
        if self.reorders and isinstance(instr, AllGather) and n > 1:
            inner = [t for t in types if math.prod(t.shape.sizes[: t.shape.index(instr.dim)]) > 1]
            return (sent, *[Computed(of_copy(t, 2 * n), 0.0) for t in inner])
        return (sent,)

    def _carried(self, instr: Transfer, local: Types) -> float:
        """Bytes of a transfer on the link: those of whole tiles, where there are."""
        moved = of_copy(local(instr.inputs[0]), 1, False)
        return moved.tiled[0] if self.tiles and moved.tiled else moved.bytes

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

    def _is_counted(self, instr: Local, local: Types) -> bool:
        """Rule (8)."""
        if not self.counted:
            return False
        types = [local(i) for i in (*instr.inputs, *instr.outputs)]
        return all(not t.shape.dims and not is_float(t.dtype) for t in types)

    def _of_local(self, instr: Local, find: Find, local: Types) -> Item:
        quantity = of_local(instr, local)
        if not self.op_by_op:
            return Computed(quantity, quantity.flops)
        inputs, outputs = tuple(map(local, instr.inputs)), tuple(map(local, instr.outputs))
        split = split_names(map(find, (*instr.inputs, *instr.outputs)))
        found = Called(instr.op, inputs, outputs, split, stays(instr.origin.phase), quantity)
        try:
            array_functions(found)
        except NoArrayFunctionError as error:
            return Computed(quantity, quantity.flops, str(error))
        return found

    def start(self, program: Program) -> Started | None:
        """What a step takes under every layout, rule (3); None where nothing is known of it."""
        if not self.op_by_op:
            return None
        return Started(sum(isinstance(instr, WriteVariable) for instr in program.code))


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


def _cut(instr: Collective, types: Sequence[TensorType], n: int) -> Iterator[Called]:
    """The slices that a collective makes of narrow rows, one for each device of its group."""
    if not isinstance(instr, ReduceScatter | AllToAll) or n == 1:
        return
    name = instr.dim if isinstance(instr, ReduceScatter) else instr.split
    for whole in types:
        dims = (Dim(d.name, d.size // n) if d.name == name else d for d in whole.shape)
        part = TensorType(Shape(dims), whole.dtype)
        if narrow(whole.shape.sizes, part.shape.sizes, part.dtype):
            op = SliceDim(name, 0, 1)
            quantity = quantity_of(op, (whole,), (part,))
            yield from [Called(op, (whole,), (part,), frozenset(), False, quantity)] * n


def _moved(loop: Loop) -> frozenset[int]:
    """Values of a loop's body that collectives make, under all their names: no kernel writes them."""
    found: set[int] = set()
    for instr in loop.body:
        if isinstance(instr, Collective) or (
            isinstance(instr, Local) and instr.op.free and found.issuperset(instr.inputs[:1])
        ):
            found.update(instr.outputs)
    return frozenset(found)


def _stacks(program: Program) -> dict[int, int]:
    """Values that loops stack -> the number of their parts."""
    loops = [instr for instr, _ in program.walk() if isinstance(instr, Loop)]
    whole = frozenset[int]().union(*map(program.longer, loops))
    made = ((stack.outer, loop.dim.size) for loop in loops for stack in loop.stacked)
    return {outer: parts for outer, parts in made if outer not in whole}
