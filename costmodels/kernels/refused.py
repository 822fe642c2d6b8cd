"""What is priced as a library's kernel although no library has one for it (`Op.refused`)."""

from __future__ import annotations

from costmodels.hardware import Hardware
from mesh_tf_core.ir.program import Local, Program

NAMED = {"tpu": "TPUs", "gpu": "NVIDIA GPUs"}


def refused(program: Program, hardware: Hardware) -> dict[str, list[str]]:
    """Why there is no such kernel -> the scopes where that is so, in order. Only programs that XLA compiles
    are asked about: a host that launches kernels has other libraries."""
    found: dict[str, dict[str, None]] = {}
    for instr, _ in program.walk() if hardware.compiled and hardware.kind in NAMED else ():
        if isinstance(instr, Local):
            reason = instr.op.refused(hardware.kind, *map(program.local, instr.inputs))
            if reason:
                found.setdefault(reason, {})[instr.origin.scope] = None
    return {reason: list(scopes) for reason, scopes in found.items()}


def sentences(program: Program, hardware: Hardware) -> list[str]:
    """One for every reason."""
    return [
        f"no library's kernel on {NAMED[hardware.kind]} takes attention with {reason} "
        f"({', '.join(scopes[:3])}{', ...' if len(scopes) > 3 else ''}): it works through blocks of logits, "
        "and takes longer than the kernel that is priced"
        for reason, scopes in refused(program, hardware).items()
    ]
