"""Model FLOPs, and which part of a machine's peak a step turns into them (MFU), or into all products (HFU).

(1) model FLOPs = sum over matrix products, convolutions and attention, forward and backward, of what the
    mathematics of the model needs: no recomputation, no padding, nothing that a layout repeats or a kernel
    does again, no products with ones and zeros that only choose, no places of experts that stay empty when
    tokens spread evenly, no pairs that positions hide (`Work.overhead`), no updates of variables
(2) MFU         = sum over dtypes of (model FLOPs / peak FLOP/s of a device) / (devices * seconds of a step)
(3) HFU         = the same of the products that the devices run: also those of recomputation, and those that a
    layout repeats

(Chowdhery et al. 2022, "PaLM", appendix B.) Where positions hide keys (a causal mask, a window), attention
counts the pairs that see each other, as Megatron-LM's `num_floating_point_operations` does of causal
attention, also where it is written out and computes all. PaLM's appendix and torchtitan count all pairs, for
causal attention 6 layers * length * heads * d_kv FLOPs a token more: their MFU of the same step is higher. A
token counts with the experts that it asks for, as long as they have room. A branch counts half of the time, a
loop that may stop early as if it did not. Imported programs count the products that they write.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from costmodels.hardware import Hardware
from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.kernels.quantities import flops_of
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Local, Program

PHASES = (Phase.FORWARD, Phase.BACKWARD)
NOTHING: Mapping[int, float] = {}


def model_flops(program: Program) -> dict[str, float]:
    """Equation (1), by the dtype that the products run in.

    Args:
      program: of a training step, on one device, nothing recomputed.
    """
    return _flops(program, PHASES, _needed)


def recomputes(program: Program) -> bool:
    """True if a step runs anything a second time."""
    return any(instr.origin.phase == Phase.RECOMPUTE for instr, _ in program.walk())


def run_flops(program: Program, done: Mapping[int, float] = NOTHING) -> dict[str, float]:
    """FLOPs of equation (3), by the dtype that the products run in.

    Args:
      done: node -> the share of its runs that stages which are programs of their own do (`StageTimes.done`).
    """
    found = _flops(program, (*PHASES, Phase.RECOMPUTE), flops_of, done)
    return {dtype: program.mesh.devices * flops for dtype, flops in found.items()}


def _flops(
    program: Program, phases: Sequence[Phase], of: Callable[..., float], done: Mapping[int, float] = NOTHING
) -> dict[str, float]:
    found = defaultdict[str, float](float)
    for instr, times in program.expected():
        if isinstance(instr, Local) and instr.op.kind in MATMUL_CLASSES and instr.origin.phase in phases:
            inputs = [program.local(i) for i in instr.inputs]
            if inputs and (flops := of(instr.op, inputs)):
                found[inputs[0].dtype] += times * flops * done.get(instr.origin.node, 1.0)
    return dict(found)


def _needed(op: Op, inputs: list[TensorType]) -> float:
    """Model FLOPs of one run."""
    work = op.work(*inputs)
    dims = work.product
    # One of rows, columns and what is summed may be 1 (a vector's product), not two (elements, or a sum).
    if (dims is not None and sorted(dims[1:])[1] == 1) or len(inputs) < 2:
        return 0.0
    return flops_of(op, inputs) - work.overhead


def utilisation(flops: Mapping[str, float], hardware: Hardware, devices: int, seconds: float) -> float:
    """Equation (2): 1 where every device does nothing but the model's products at its peak. Virtual devices
    share the peak of their cores."""
    least = sum(n / hardware.peak_flops(dtype) for dtype, n in flops.items())
    return least * hardware.contention(devices) / (devices * seconds) if seconds else 0.0
