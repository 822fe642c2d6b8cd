"""A program through XLA's compilers, not run: its StableHLO, and its executable for a TPU elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.engines.jax import compat as jax_compat
from mesh_tf_core.ir.program import Program


@dataclass(frozen=True)
class CompilerRefusal:
    """Why the compiler made no executable; `out_of_memory` if the program does not fit on the device.

    Attributes:
      reason: one line.
      used, limit: bytes, if the compiler reports them.
      late: the time limit passed before the compiler ended.
    """

    reason: str
    out_of_memory: bool
    used: int | None = None
    limit: int | None = None
    late: bool = False


@dataclass(frozen=True)
class Executable:
    """The compiled program of one device.

    Attributes:
      text: compiled HLO.
      peak_bytes: most bytes of device memory that hold a value at any moment. (The compiler includes the
        host's memory: the difference is used, and at most the reserved bytes.)
      allocated_bytes: bytes that the program reserves: arguments, new outputs, and its heap with gaps.
      seconds: of compilation.
      host_bytes: bytes that it reserves in the host's memory.
    """

    text: str
    peak_bytes: int
    allocated_bytes: int
    seconds: float
    host_bytes: int = 0


def compile_for(
    program: Program,
    topology: str,
    instead: Callable[[Any], Any] | None = None,
    begins: Callable[[str], object] = lambda what: None,
) -> Executable | CompilerRefusal:
    """The program compiled by the real TPU compiler, ahead of time, no TPU needed.

    Args:
      topology: chips by the compiler's name, as v5e:2x4; as many devices as the program's mesh has.
      instead: mesh of JAX -> another function, traced for it (`jax.stages.Lowered`), that is compiled.
      begins: called with what begins.

    Raises:
      UserError: no JAX or libtpu, an unknown topology, another number of devices.
    """
    jax_compat.require("libtpu")
    jax_compat.stay_on_cpu()
    from mesh_tf_core.engines.jax.program import JaxProgram

    start = time.perf_counter()
    begins("tracing the step")
    devices = jax_compat.topology_mesh(topology, program.mesh)
    lowered = JaxProgram(program, devices, "tpu").lowered() if instead is None else instead(devices)
    begins("compiling the step")
    try:
        made = lowered.compile()
    except jax_compat.compile_errors() as error:
        return _refusal(str(error))
    stats = made.memory_analysis()
    fresh = stats.output_size_in_bytes - stats.alias_size_in_bytes
    allocated = stats.argument_size_in_bytes + fresh + stats.temp_size_in_bytes
    seconds = time.perf_counter() - start
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    host += stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    peak = stats.peak_memory_in_bytes
    peak = min(peak - stats.host_argument_size_in_bytes, allocated) if host else peak
    return Executable(made.as_text(), int(peak), int(allocated), seconds, int(host))


def stablehlo(program: Program) -> str:
    """The program as StableHLO text for a TPU, over the program's mesh without devices."""
    jax_compat.require()
    jax_compat.stay_on_cpu()
    from mesh_tf_core.engines.jax.program import JaxProgram

    made = JaxProgram(program, jax_compat.abstract_mesh(program.mesh), "tpu")
    return str(made.lowered(lowering_platforms=("tpu",)).as_text())


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_AMOUNTS = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(r"required for .*? \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)


def _refusal(said: str) -> CompilerRefusal:
    """The compiler's error: its first line says all that a user needs."""
    found = next((m for m in (pattern.search(said) for pattern in _AMOUNTS) if m), None)
    first = next((line.strip() for line in said.splitlines() if line.strip()), "no reason given")
    memory = found is not None or "RESOURCE_EXHAUSTED" in said
    if found is None:
        return CompilerRefusal(first[:500], memory)
    used, limit = (round(float(n) * _UNITS[u]) for n, u in (found.group(1, 2), found.group(3, 4)))
    return CompilerRefusal(first[:500], memory, used, limit)
