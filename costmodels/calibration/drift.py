"""Drift of a machine's speed since its calibration: two of its probes, measured again.

A machine that others use, or that throttles its clock, runs the same program more slowly in CPU time too. The
ratio of the two distinguishes an error of the model from a change of the machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from costmodels.calibration.clock import TimingSample, sample, steps_for, typical
from costmodels.calibration.probes import Probe, probes
from costmodels.hardware import Hardware
from mesh_tf_core.engines import Engine, open_engine
from mesh_tf_core.ir.mesh import Mesh

REFERENCES = ("matmul 512x512x512", "binary.same 1024x512")
SECONDS = 0.05


@dataclass
class Drift:
    """References that are ready to run, their seconds at the calibration, and their present seconds."""

    then: Sequence[float]
    engines: Sequence[Engine]
    now: list[list[TimingSample]] = field(default_factory=list)

    def measure(self) -> None:
        """One sample of every reference."""
        found = []
        for engine in self.engines:

            def step(engine: Engine = engine) -> object:
                return engine.step({})

            found.append(sample(step, steps_for(step, SECONDS)))
        self.now.append(found)

    @property
    def ratio(self) -> float | None:
        """Seconds now / seconds then, the geometric mean over the references; None without any."""
        if not self.now or not self.then:
            return None
        took = [typical(samples) for samples in zip(*self.now, strict=True)]
        return math.exp(sum(math.log(n / t) for n, t in zip(took, self.then, strict=True)) / len(took))


@contextmanager
def open_drift(mesh: Mesh, hardware: Hardware, engine: str = "local") -> Iterator[Drift]:
    """References of a profile of this mesh and engine; none (and a ratio of None) for any other hardware."""
    wanted = references(mesh, hardware, engine)
    ready: list[Engine] = []
    try:
        for probe, _ in wanted:
            ready.append(open_engine(probe.program(mesh), engine))
            ready[-1].initialize()
            ready[-1].step({})
        yield Drift([seconds for _, seconds in wanted], ready)
    finally:
        for one in ready:
            one.close()


def references(mesh: Mesh, hardware: Hardware, engine: str = "local") -> list[tuple[Probe, float]]:
    """The reference probes, with the seconds of the profile; none for profiles that other processes measured
    too."""
    found = {} if hardware.calibration is None else json.loads(hardware.calibration.machine)
    measured_alike = found.get("mesh") == str(mesh) and found.get("engine", "local") == engine
    if hardware.calibration is None or not measured_alike or found.get("processes", 1) > 1:
        return []
    measured = {m["name"]: m["seconds"] for m in json.loads(hardware.calibration.measurements)}
    known = {p.name: p for p in probes(mesh, quick=True)}
    return [(known[n], measured[n]) for n in REFERENCES if n in measured and n in known]
