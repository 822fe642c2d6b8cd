"""The errors of a calibrated profile on the measurements that it was fitted to, and on others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from costmodels.calibration.fit import CalibrationFit, FittedCurve, repeat
from costmodels.calibration.probes import LAUNCH, GroupShape, Probe, groups, probes
from costmodels.calibration.tpu_probes import CHECK, PRODUCT
from costmodels.hardware import Hardware
from costmodels.network.collectives import COLLECTIVES
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh


@dataclass(frozen=True)
class FitResidual:
    """One measurement with the profile's value.

    Attributes:
      what: kind of work.
      size: bytes of the array function or of the collective's full array; FLOPs of a matrix product.
      measured, fitted: seconds of one repeat with all devices at work.
      held_out: the fit had not seen it.
    """

    what: str
    size: float
    measured: float
    fitted: float
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
