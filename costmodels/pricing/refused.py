"""Attention that is priced as a library's kernel although no library has one for it
(`mesh_tf_core.kernels.libraries`)."""

from costmodels.hardware import Hardware
from costmodels.pricing.compilers import compiler_of
from mesh_tf_core.ir.program import Local, Program
from mesh_tf_core.kernels.libraries import lacks_kernel
from mesh_tf_core.ops.attending import AnyAttention

NAMED = {"tpu": "TPUs", "gpu": "NVIDIA GPUs"}


def sentences(program: Program, hardware: Hardware) -> list[str]:
    """One for every reason for a missing kernel, in order; none if the compiler's libraries are not known."""
    found: dict[str, dict[str, None]] = {}
    library = compiler_of(hardware).library
    for instr, _ in program.walk() if library else ():
        if isinstance(instr, Local) and isinstance(instr.op, AnyAttention):
            reason = lacks_kernel(instr.op.laid(*map(program.local, instr.inputs)), library)
            if reason:
                found.setdefault(reason, {})[instr.origin.scope] = None
    return [
        f"no library kernel on {NAMED[library]} supports attention with {reason} "
        f"({', '.join([*scopes][:3])}{', ...' if len(scopes) > 3 else ''}), so this attention runs in blocks "
        "of logits and takes longer than predicted, because the prediction assumes a kernel"
        for reason, scopes in found.items()
    ]
