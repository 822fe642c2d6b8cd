"""The profile of a calibrated machine: the preset `cpu-local` with its numbers replaced by measured ones."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from costmodels.calibration.clock import Noise
from costmodels.calibration.fit import Fit, Fitted
from costmodels.hardware import preset_content
from mesh_tf_core.engines.tf_devices import cores
from mesh_tf_core.mesh import Mesh

BASE = "cpu-local"
METHOD = (
    "seconds of array functions, products and collectives in programs run by the engine on all devices at "
    "once; a product is launch + a FLOPs + b bytes read + c bytes written with coefficients >= 0 (least "
    "relative squares), everything else a non-decreasing curve (pooling adjacent violators)"
)
PREFIXES = {
    "kernel": "kernel.binary.same",
    "kernel.binary": "kernel.binary.same",
    "kernel.reduce": "kernel.reduce.inner",
    "kernel.cast": "kernel.cast.number",
    "kernel.where": "kernel.where.row",
    "kernel.take": "kernel.take.rows",
    "kernel.transpose": "kernel.transpose.rows",
}
"""Classes that stand for those below them that have no measurement of their own."""
COARSE = {
    "elementwise": "kernel.binary.same",
    "reduce": "kernel.reduce.inner",
    "gather": "kernel.take.rows",
    "data": "kernel.copy",
    "random": "kernel.binary.same",
}
"""Curves of whole operations, for what is not priced call by call."""


def profile(
    mesh: Mesh, found: Fit, measurements: Sequence[Mapping[str, Any]], noise: Noise, quick: bool
) -> dict[str, Any]:
    """The content of a hardware file (format layoutopt-hardware/1)."""
    content = preset_content(BASE)
    date = datetime.date.today().isoformat()
    source = f"measured by calibration on this machine, mesh {mesh}"
    curves = dict(found.curves)
    for name, like in {**PREFIXES, **COARSE}.items():
        if like in curves and name not in curves:
            curves[name] = curves[like]
    content["summary"] = f"This machine's cores as virtual devices, measured on {date}"
    content["calibrated"] = True
    content["compute_curves"] = [
        {
            **_curve(f, source, date),
            "op_class": name,
            "dtype": "float32",
            "against": f.against,
            "devices": mesh.devices,
        }
        for name, f in curves.items()
    ] + [
        _constant(n, s, mesh, source, date)
        for n, s in (("kernel.step", found.step), ("kernel.store", found.store))
    ]
    content["collective_curves"] = [
        {**_curve(f, source, date), "collective": f.op_class, "group_size": n, "devices": mesh.devices}
        for n, f in found.collectives
    ]
    _chip(content["chip"], found, mesh, source, date)
    content["topology"]["latency"] = _number(_least_latency(found), "s", source, date)
    content["calibration"] = {
        "date": date,
        "machine": {**machine(), "mesh": str(mesh), "noisy": noise.noisy, "noise": noise.words},
        "versions": versions(),
        "fit": {
            "method": METHOD,
            "quick": quick,
            "held_out_error": held_out(found),
            "held_out": found.held_out,
            "uncertainty": {name: f.uncertainty for name, f in found.curves.items()},
        },
        "measurements": [dict(m) for m in measurements],
        "base": BASE,
    }
    content["notes"] = [
        f"{noise.words}.",
        f"Held-out error of operations that the fit did not see: {held_out(found):.1%}.",
    ]
    return content


def held_out(found: Fit) -> float:
    """Median relative error of the checks."""
    return median(abs(e) for e in found.held_out.values()) if found.held_out else 0.0


def machine() -> dict[str, Any]:
    """What this machine is."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": platform.platform(),
        "memory_bytes": memory_bytes(),
    }


def versions() -> dict[str, str]:
    """Of what the measurements depend on."""
    found = {"python": platform.python_version()}
    for name in ("tensorflow", "numpy", "layoutopt"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _chip(chip: dict[str, Any], found: Fit, mesh: Mesh, source: str, date: str) -> None:
    """Rates of one device while all work, times the devices that share a core: a core's rates."""
    shared = max(1.0, mesh.devices / cores())
    chip["host_cores"] = _number(cores(), "count", source, date)
    total = memory_bytes() / max(mesh.devices, 1)
    chip["memory"] = _number(total, "B", "physical memory of this machine, shared by the devices", date)
    chip["memory_reserve"] = _number(
        0.1 * total, "B", "assumption: a tenth is for the system and the runtime", date
    )
    product = found.curves.get("kernel.matmul")
    if product is not None:
        (_, launch), (flops, seconds) = product.curve.points[0], product.curve.points[-1]
        slope = max((seconds - launch) / flops, 1e-18)
        chip["peak_flops"] = {"float32": _number(shared / slope, "FLOP/s", source, date, product.uncertainty)}
    same = found.curves.get("kernel.binary.same")
    if same is not None:
        rate = max(x / y for x, y in same.curve.points if y > 0)
        chip["memory_bandwidth"] = _number(shared * rate, "B/s", source, date, same.uncertainty)
        launch = same.curve.points[0][1] / shared
        chip["launch_overhead"] = _number(launch, "s", source, date, same.uncertainty)


def _least_latency(found: Fit) -> float:
    return min((f.curve.points[0][1] for _, f in found.collectives), default=0.0)


def _curve(found: Fitted, source: str, date: str) -> dict[str, Any]:
    points = [[x, y] for x, y in found.curve.points]
    return {"points": points, "source": source, "date": date, "uncertainty": found.uncertainty}


def _constant(name: str, seconds: float, mesh: Mesh, source: str, date: str) -> dict[str, Any]:
    common = {"op_class": name, "dtype": "float32", "against": "bytes", "devices": mesh.devices}
    return {"points": [[0.0, seconds]], "source": source, "date": date, **common}


def _number(
    value: float, unit: str, source: str, date: str, uncertainty: float | None = None
) -> dict[str, Any]:
    made = {"value": value, "unit": unit, "source": source, "date": date}
    return made if uncertainty is None else {**made, "uncertainty": uncertainty}
