"""Programs that a host runs, launching one kernel after the other, as PyTorch's do.

(1) The host counts: an operation on single whole numbers alone is not a kernel. PyTorch counts layers and
    microbatches in Python, and hands a dropout's seed and offset to its kernel as arguments
    (pytorch/pytorch aten/src/ATen/cuda/CUDAGeneratorImpl.cpp @03e68c4b).
(2) FSDP stores a layer's weights end to end, so small messages travel together with large ones (Zhao et al.
2023, section 3.2).
(3) Each stage of a pipeline is a program of its own (Narayanan et al. 2021, section 2.2), and autograd keeps
what backward reads where it was made: nothing is copied into a ring, or out of one.
(4) FSDP2 scatters the gradients of each layer, also with the last microbatch alone (`post_backward` of
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
(5) Memory (`costmodels.liveness`, rules 9 to 14). Fused kernels keep their operands alone: SwiGLU, GELU and
norms with their statistics (NVIDIA/Megatron-LM @00caa53a, megatron/core/fusions/fused_bias_swiglu.py). The
loss casts the logits to float32 and works on the copy in place (@00611e6e,
megatron/core/tensor_parallel/cross_entropy.py). PyTorch's own kernels write results to new memory and keep
what their derivatives read (pytorch/pytorch tools/autograd/derivatives.yaml). Both keep the masks of
dropout, a byte an element (Korthikanti et al. 2022, section 4.1), and weights in the type of the computation
as the model's parameters (Rajbhandari et al. 2020, section 3.1).
(6) PyTorch has one kernel for all operations of a call such as layer_norm, gelu, batch_norm or linear with a
bias (aten/src/ATen/native/native_functions.yaml), and backward of the call makes again what it can from what
it keeps. (7) It stacks nothing: a loop's stacks are the arrays that the iterations made, each where it was
made. (8) Models write RMSNorm out of pow, mean, rsqrt and mul, and each is a kernel (LlamaRMSNorm of
huggingface/transformers, src/transformers/models/llama/modeling_llama.py), and some activations so
(`NewGELUActivation` of src/transformers/activations.py). (9) The optimizer's kernels work
on all variables at once (torch.optim's foreach; Apex's and TransformerEngine's multi_tensor_apply). (10)
Linear attention and state spaces are a library's kernels, `LibraryKernels`; the operations that stand for
them (`mesh_tf_core.layers.recurrent.KERNEL`) take no time. (11) Rows reach a device of Megatron-Core by
sender: a kernel sorts them by its experts, another one sorts results back, and two do so backward; DeepEP's
and HybridEP's messages sort (NVIDIA/Megatron-LM @23dd639c, megatron/core/transformer/moe/token_dispatcher.py,
`sort_chunks_by_idxs`). (12) Bounds of its gated units are outside of the fused kernel: PyTorch's kernels
bound each half and join the halves again, and backward reads what was bounded, too (megatron/core/fusions/
fused_bias_geglu.py, `weighted_bias_quick_geglu_impl`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from costmodels.hardware import Hardware
from costmodels.kept import STEPS, of_ring
from costmodels.kernels.compute import Quantity
from costmodels.kernels.fused import cast_terms
from costmodels.kernels.fusion import Fuses
from costmodels.kernels.partition import FusedKernel, Types
from costmodels.kernels.quantities import apart, of_copy
from costmodels.liveness import MemoryRules
from costmodels.pricing.compilers.base import Compiler, in_library
from costmodels.pricing.compilers.xla import Joining, Xla
from costmodels.pricing.items import Called, Computed
from costmodels.pricing.units import Find, Unit
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllToAll, Collective, Local, Loop, Program
from mesh_tf_core.ops.activations import Clip
from mesh_tf_core.ops.custom import LibraryKernels
from mesh_tf_core.ops.norm import Normalize, NormalizeGrad
from mesh_tf_core.ops.unary import Unary, UnaryGrad

C = TypeVar("C", Computed, Computed | Called)


def is_no_kernel(instr: Local, local: Types) -> bool:
    """Rules (1), (3), (10): whether an instruction is the host's, moves nothing, or is part of a library's
    kernels."""
    types = (local(i) for i in (*instr.inputs, *instr.outputs))
    counts = all(not t.shape.dims and not is_float(t.dtype) for t in types)
    return counts or of_ring(instr.op) or in_library(instr)


@dataclass(frozen=True)
class HostLaunched(Joining):
    """A host launches every kernel, rules (1) to (3) and (9)."""

    calls: ClassVar[bool] = True

    def kernel(self, kernel: FusedKernel, local: Types) -> Iterator[Computed]:
        if not all(is_no_kernel(instr, local) for instr in kernel.instrs):
            yield from _joined(super().kernel(kernel, local), kernel.instrs[0])

    def local(self, instr: Local, find: Find, local: Types) -> Iterator[Computed | Called]:
        if isinstance(op := instr.op, LibraryKernels):
            size = local(instr.outputs[0]).shape.size
            for b, f, chunks, own in op.kernels:
                work = Quantity(f * size, b * size, "data", "bfloat16", vector=own * size, chunks=chunks)
                yield Computed(work, work.flops + work.vector)
        elif not is_no_kernel(instr, local):
            yield from _joined(super().local(instr, find, local), instr)


def _joined(items: Iterable[C], instr: Local) -> Iterator[C]:
    """Rule (9) for the items of an instruction."""
    for item in items:
        if isinstance(item, Computed) and instr.origin.phase == Phase.UPDATE:
            item = replace(item, quantity=replace(item.quantity, joins=True))
        yield item


@dataclass(frozen=True)
class EagerLaunch(HostLaunched):
    """Every call of the library is a kernel, rule (6), and every other operation; `norms`: rule (8) does not
    hold for RMSNorm."""

    name: ClassVar[str] = "eager"
    norms: ClassVar[bool] = False
    memory: ClassVar[MemoryRules] = MemoryRules(
        fuses=Fuses.CALLS, stage_programs=True, remakes=True, masks=True, parameters=True, overwrites=False
    )

    def parts(self, program: Program) -> Mapping[int, int]:
        """Rule (4)."""
        results = (result.outer for loop in program.every(Loop) for result in loop.stacked)
        sums = {program.added.get(result, result) for result in results}
        return {i: program.values[i].shape.sizes[0] for i in (program.joined.get(sum, sum) for sum in sums)}

    def stacked(self, program: Program, loop: Loop) -> Iterator[tuple[Unit, float]]:
        """Rule (7)."""
        yield from ()

    def summed(self, program: Program, loop: Loop) -> Iterator[tuple[Unit, float]]:
        casts = cast_terms(program, loop)
        for unit, times in super().summed(program, loop):
            assert isinstance(unit, Local)
            term = unit.inputs[0]
            total = casts.get(term, term) if self.width(program, term) < 1 else term
            yield replace(unit, inputs=(casts.get(term, term), total), outputs=(total,)), times

    def local(self, instr: Local, find: Find, local: Types) -> Iterator[Computed | Called]:
        rms = isinstance(instr.op, Normalize | NormalizeGrad) and not instr.op.center
        if rms and not self.norms:  # Rule (8).
            for part in apart(instr.op, [local(i) for i in instr.inputs]):
                yield Computed(part, part.flops)
            return
        steps = STEPS.get(op.fn, (1, 1, 1)) if isinstance(op := instr.op, Unary | UnaryGrad) else (1, 1, 1)
        for _ in range(steps[1 + isinstance(op, UnaryGrad)]):
            yield from super().local(instr, find, local)


@dataclass(frozen=True)
class EagerNorms(EagerLaunch):
    """As `EagerLaunch`, where models call a kernel for RMSNorm."""

    name: ClassVar[str] = "eager-norms"
    norms: ClassVar[bool] = True


@dataclass(frozen=True)
class Launched(HostLaunched, Xla):
    """Kernels fuse as in XLA, written by hand (Megatron-LM's), or made by a compiler one by one."""

    name: ClassVar[str] = "launched"
    memory: ClassVar[MemoryRules] = MemoryRules(
        fuses=Fuses.ALL, stage_programs=True, remakes=True, wide_logits=True, masks=True, parameters=True
    )


@dataclass(frozen=True)
class HandFused(Launched):
    """Megatron-Core's kernels; `sorts`: rule (11) holds."""

    name: ClassVar[str] = "hand-fused"
    sorts: bool = True

    @classmethod
    def of(cls, hardware: Hardware) -> Compiler:
        return cls(bool(hardware.collective_curves), sorts=getattr(hardware.topology, "dispatch", "") is None)

    def kernel(self, kernel: FusedKernel, local: Types) -> Iterator[Computed]:
        yield from super().kernel(kernel, local)
        for instr in kernel.instrs:  # Rule (12).
            if isinstance(instr.op, Clip) and len((bounded := local(instr.outputs[0])).shape.dims) > 1:
                yield Computed(of_copy(bounded, 4 + (instr.origin.phase == Phase.BACKWARD)), 0.0)

    def copies(self, instr: Collective, types: Sequence[TensorType], mesh: Mesh) -> Iterator[Computed]:
        experts = types[0].shape.sparse if self.sorts and isinstance(instr, AllToAll) else None
        if experts is not None and experts.whole > mesh.group_size(instr.axes) > 1:
            yield from [Computed(of_copy(t, 2), 0.0) for t in types]


BY_HOSTS = Launched, HandFused, EagerLaunch, EagerNorms
