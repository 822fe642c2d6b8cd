"""The errors of a calibrated profile on the measurements that it was fitted to, and on others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from costmodels.calibration.clock import TimingSample, sample, steps_for, typical
from costmodels.calibration.fit import CalibrationFit, FittedCurve, repeat
from costmodels.calibration.probes import LAUNCH, GroupShape, Probe, groups, probes
from costmodels.calibration.tpu_probes import CHECK, PRODUCT
from costmodels.hardware import Hardware
from costmodels.network.collectives import COLLECTIVES
from mesh_tf_core.engines import Engine, open_engine
from mesh_tf_core.ir.layout import Axes
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


@dataclass(frozen=True)
class FitResidual:
    """One measurement with the profile's value.

    Attributes:
      what: kind of work.
      size: bytes of the array function or of the collective's full array; FLOPs of a matrix product.
      measured_seconds, predicted_seconds: of one repeat with all devices at work.
      held_out: the fit had not seen it.
    """

    what: str
    size: float
    measured_seconds: float
    predicted_seconds: float
    held_out: bool


def residuals(hardware: Hardware) -> list[FitResidual]:
    """Every measurement of a calibrated profile that its curves predict; none for other hardware."""
    if hardware.calibration is None:
        return []
    found = hardware.calibration
    if not json.loads(found.machine).get("measured", True):
        return [  # fitted to a compiler's estimates
            FitResidual(
                r["name"].partition(" ")[0].replace("_", " "),
                r["flops"] if r["kind"] == PRODUCT else r["bytes"],
                r["seconds"],
                r["seconds"] * (1 + r["fitted"]),
                r["kind"] == CHECK,
            )
            for r in json.loads(found.measurements)
        ]
    mesh, quick = Mesh(json.loads(found.machine)["mesh"]), bool(json.loads(found.fit)["quick"])
    measured = {m["name"]: m for m in json.loads(found.measurements)}
    fit, kinds = _fit(hardware), groups(mesh, hardware.devices_per_process)
    out = []
    for probe in probes(mesh, quick, hardware.devices_per_process):
        if probe.name in measured and probe.target != "stores":
            fitted = _fitted(fit, kinds, probe)
            if fitted is not None:
                seconds = repeat(fit, probe, measured[probe.name])
                size = sum(c.flops for c in probe.calls) or probe.bytes or sum(c.bytes for c in probe.calls)
                out.append(FitResidual(_what(probe), size, seconds, fitted, probe.target == "check"))
    return out


def _fit(hardware: Hardware) -> CalibrationFit:
    """A profile's curves as they were fitted."""
    curves = {
        c.op_class: FittedCurve(c.op_class, c.against, c.seconds, c.uncertainty or 0.0)
        for c in hardware.compute_curves
    }
    collectives = [
        ((c.group_size, c.processes), FittedCurve(c.collective, "bytes", c.seconds, c.uncertainty or 0.0))
        for c in hardware.collective_curves
    ]
    constants = {n: curves[n].curve(0.0) if n in curves else 0.0 for n in ("kernel.step", "kernel.store")}
    return CalibrationFit(constants["kernel.step"], constants["kernel.store"], curves, collectives)


def _fitted(fit: CalibrationFit, kinds: Mapping[Axes, GroupShape], probe: Probe) -> float | None:
    """Seconds of one repeat by the profile; None if it has no curve for it."""
    if probe.target == LAUNCH:
        return fit.seconds(probe.calls, repeated=False)
    if probe.op is None:
        own = kinds[probe.axes], probe.target
        return next((f.curve(probe.bytes) for kind, f in fit.collectives if (kind, f.op_class) == own), None)
    try:
        return fit.seconds(probe.calls)
    except KeyError:
        return None


def _what(probe: Probe) -> str:
    if probe.target == "check":
        return "held out from the fit"
    if probe.target in COLLECTIVES:
        return "collectives"
    names = {"launch": "launches", "matmul": "matmuls", "batch": "batched matmuls"}
    return {**names, "matmul.conv": "convolutions"}.get(
        probe.target,
        "element by element" if probe.target.split(".")[0] in ("unary", "binary") else "passes over memory",
    )
