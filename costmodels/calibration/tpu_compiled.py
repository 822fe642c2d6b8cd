"""Cycles of the probes by the real TPU compiler: compiled here, or as they ship with the project; the TPUs
under the compiler's names, and the clock of its cycle estimates.

(1) clock           = peak FLOP/s / FLOPs per cycle
(2) FLOPs per cycle = 2 x rows x columns of a matrix unit x matrix units of a device

The file is remade, one TPU after the other, by `layoutopt calibrate --target tpu-v5e --refresh`.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from costmodels.calibration.runner import OnProbe, Partial
from costmodels.calibration.tpu_probes import TpuProbe
from costmodels.hardware import Hardware, load_hardware
from mesh_tf_core.engines.jax import compat, hlo
from mesh_tf_core.engines.jax.compile import CompilerRefusal, compile_for
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.files import write_file


@dataclass(frozen=True, slots=True)
class Generation:
    """A TPU: our preset, its FLOPs per cycle and device in bfloat16, its smallest topology.

    docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm and its pages per version give the matrix units.
    For v6e, whose pages state 2 or 4, and v7 the compiler's estimates of large products fit 4 of 256 x 256.

    Attributes:
      smallest: sides of the smallest topology, in chips.
    """

    hardware: str
    flops_per_cycle: int
    smallest: str

    def clock(self, hardware: Hardware) -> float:
        """Cycles per second, equation (1)."""
        return hardware.peak_flops("bfloat16") / self.flops_per_cycle


GENERATIONS = {
    "v2": Generation("tpu-v2", 2 * 128 * 128, "2x2"),
    "v3": Generation("tpu-v3", 2 * 128 * 128 * 2, "2x2"),
    "v4": Generation("tpu-v4", 2 * 128 * 128 * 8, "2x2x1"),
    "v5e": Generation("tpu-v5e", 2 * 128 * 128 * 4, "2x2"),
    "v5p": Generation("tpu-v5p", 2 * 128 * 128 * 8, "2x2x1"),
    "v6e": Generation("tpu-v6e", 2 * 256 * 256 * 4, "2x2"),
    "tpu7x": Generation("tpu-v7", 2 * 256 * 256 * 4, "2x2x1"),
}
"""By the first part of the compiler's topology names."""

FORMAT = "layoutopt-tpu-probes/1"
SHIPPED = Path(__file__).parent / "data" / "tpu_probes.json"
COMPILER = ("jax", "jaxlib", "libtpu")


@dataclass(frozen=True)
class CompiledProbes:
    """The compiler's estimates of the probes of one TPU.

    Attributes:
      topology: that was compiled for, as v5e:2x2; every device of it runs the whole probe.
      versions: of the compiler's packages.
      cycles: by the probes' names: the compiler's estimate for one device, without communication.
      seconds: the same by the chip's clock.
    """

    target: str
    topology: str
    date: str
    versions: Mapping[str, str]
    cycles: Mapping[str, int]
    seconds: Mapping[str, float]

    @property
    def compiler(self) -> str:
        return f"libtpu {self.versions['libtpu']}"


def known_target(target: str) -> tuple[str, Generation]:
    """The TPU that a target names; UserError for an unknown one."""
    targets = {generation.hardware: (name, generation) for name, generation in GENERATIONS.items()}
    if target not in targets:
        raise UserError(f"--target {target!r} is not a known TPU; {known_names(target, targets)}")
    return targets[target]


def shipped_probes(target: str) -> CompiledProbes | None:
    """The results that ship with the project; None if there are none for this TPU."""
    found = _read()["targets"].get(target)
    if found is None:
        return None
    rows = found["probes"]
    return CompiledProbes(
        target,
        found["topology"],
        found["date"],
        found["versions"],
        {row["name"]: row["cycles"] for row in rows},
        {row["name"]: row["seconds"] for row in rows},
    )


def compile_probes(
    target: str,
    probes: Sequence[TpuProbe],
    on_progress: OnProbe | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    resume: Path | None = None,
) -> CompiledProbes:
    """Compiles every probe for the smallest topology of a TPU; no TPU is needed. Some minutes.

    Args:
      on_progress: called with (the next probe, probes done, probes in all).
      around: made around every compilation, which writes to stderr.
      resume: a file of partial results; written while compiling, read if it exists, removed at the end.

    Raises:
      UserError: an unknown target, no JAX or libtpu, a compiler that refuses a probe.
    """
    name, generation = known_target(target)
    compat.require("libtpu")
    hardware, topology = load_hardware(target), f"{name}:{generation.smallest}"
    devices = math.prod(map(int, generation.smallest.split("x"))) * hardware.devices_per_chip
    versions = {package: version(package) for package in COMPILER}
    partial = Partial(resume, {"topology": topology, **versions})
    for number, probe in enumerate(probes):
        if on_progress is not None:
            on_progress(probe.name, number, len(probes))
        if probe.name not in partial.done:
            with around():
                made = compile_for(probe.program(devices), topology)
            if isinstance(made, CompilerRefusal):
                raise UserError(f"the TPU compiler rejected the probe {probe.name!r}: {made.reason}")
            partial.done[probe.name] = {"name": probe.name, "cycles": hlo.read(made.text).cycles}
            partial.save()
    partial.finish()
    cycles = {probe.name: int(partial.done[probe.name]["cycles"]) for probe in probes}
    clock = generation.clock(hardware)
    seconds = {name: count / clock for name, count in cycles.items()}
    return CompiledProbes(target, topology, datetime.date.today().isoformat(), versions, cycles, seconds)


def ship(compiled: CompiledProbes) -> Path:
    """Writes the results of one TPU into the file that ships with the project.

    Raises:
      UserError: it cannot be written, as in an installation of the system's.
    """
    content = _read()
    content["targets"][compiled.target] = {
        "topology": compiled.topology,
        "date": compiled.date,
        "versions": dict(compiled.versions),
        "probes": [
            {"name": name, "cycles": cycles, "seconds": float(f"{compiled.seconds[name]:.6g}")}
            for name, cycles in compiled.cycles.items()
        ],
    }
    content["targets"] = dict(sorted(content["targets"].items()))
    return write_file(SHIPPED, json.dumps(content, indent=1) + "\n", "the file of estimates")


def _read() -> dict[str, Any]:
    if not SHIPPED.is_file():
        return {"format": FORMAT, "targets": {}}
    content: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return content
