"""`calibrate` measures and fits a machine, and writes its profile: the preset `cpu-local` with its numbers
replaced by measured ones."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from costmodels.calibration.clock import ClockNoise
from costmodels.calibration.fit import CalibrationFit, FittedCurve, fit
from costmodels.calibration.probes import Probe, groups, probes
from costmodels.calibration.runner import (
    OnProbe,
    Partial,
    Team,
    accelerator_memory_bytes,
    assemble,
    measure,
    noise_of,
    versions,
)
from costmodels.hardware import preset_content
from mesh_tf_core.engines import Cluster
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.mesh import Mesh

QUICK, THOROUGH = 45.0, 480.0
"""Seconds after which the remaining measurements get fewer repeats."""


def calibrate(
    mesh: Mesh | str,
    on_progress: OnProbe | None = None,
    quick: bool = True,
    resume: str | Path | None = None,
    wanted: Sequence[Probe] | None = None,
    cluster: Cluster | None = None,
    engine: str = "auto",
) -> dict[str, Any]:
    """Measures this machine's mesh, or a cluster's; returns the content of its profile (see
    `costmodels.hardware.write_profile`).

    The machine should be idle: `content["calibration"]["machine"]["noisy"]` records whether it was.

    Args:
      mesh: its devices are this process's (or those of the cluster's processes, in the order of their ranks),
        all at work at once as in a step.
      on_progress: called with (current measurement, measurements done, number of measurements).
      quick: about 45 s on two cores, else about ten times that: more sizes, more repeats.
      resume: a file of partial results; written while measuring, read if it exists, removed at the end; of
        a cluster's processes, worker 0 does so.
      wanted: the probes (None: all of `costmodels.calibration.probes`).
      cluster: the processes; each calls this function with the same arguments and gets the same content.
      engine: the engine of the programs (see `mesh_tf_core.engines.open_engine`).

    Raises:
      UserError: a mesh of one device, or one that the processes cannot divide; a file to resume from that is
        of another mesh.
      ClusterError: another process was lost.
    """
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    if mesh.devices < 2:
        raise UserError(
            f"mesh [{mesh}] has one device; calibrate on a mesh of at least two devices, e.g. data:2"
        )
    team = assemble(mesh, cluster, engine)
    if cluster is not None:
        cluster.same("what is measured", f"mesh {mesh}, {'quick' if quick else 'thorough'}")
    each = team.devices_per_process
    chosen = list(probes(mesh, quick, each) if wanted is None else wanted)
    key = {"mesh": str(mesh), "processes": team.processes, "quick": quick, "versions": versions(team.engine)}
    partial = Partial(Path(resume) if resume is not None and team.is_writer else None, key)
    partial.done = team.broadcast("the partial results", partial.done)
    rounds, seconds, budget = (5, 0.02, QUICK) if quick else (15, 0.05, THOROUGH)
    measure(team, chosen, rounds, seconds, budget, partial.done, on_progress, partial.save)
    done = [partial.done[p.name] for p in chosen]
    found = fit(chosen, partial.done, groups(mesh, each))
    content = profile(team, found, done, noise_of(done), quick)
    partial.finish()
    return content


BASE = "cpu-local"
METHOD = (
    "measured seconds of array functions, matrix products and collectives in programs that the engine "
    "runs on all devices at once; the time of a product is launch + a * FLOPs + b * bytes with "
    "coefficients >= 0 for each part (least squares of relative errors), and all other times are "
    "non-decreasing curves (pool adjacent violators)"
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
"""Classes whose curves apply to more specific classes without measurements."""
COARSE = {
    "elementwise": "kernel.binary.same",
    "reduce": "kernel.reduce.inner",
    "gather": "kernel.take.rows",
    "data": "kernel.copy",
    "random": "kernel.binary.same",
}
"""Curves of whole operations, for hardware without curves of array functions."""


def profile(
    team: Team, fit: CalibrationFit, measurements: Sequence[Mapping[str, Any]], noise: ClockNoise, quick: bool
) -> dict[str, Any]:
    """The content of a hardware file (format layoutopt-hardware/1)."""
    content, mesh = preset_content(BASE), team.mesh
    date = datetime.date.today().isoformat()
    source = f"measured by calibration on this machine, mesh {mesh}"
    if team.processes > 1:
        source += f" over {team.processes} processes"
    curves = dict(fit.curves)
    for name, like in {**PREFIXES, **COARSE}.items():
        if like in curves and name not in curves:
            curves[name] = curves[like]
    content["summary"] = f"{_summary(team)}, measured on {date}"
    content["calibrated"] = True
    if team.accelerated:
        content["kind"], content["device"] = team.kind, f"one {team.kind.upper()}"
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
        _constant(n, s, mesh.devices, source, date)
        for n, s in (("kernel.step", fit.step), ("kernel.store", fit.store))
    ]
    content["collective_curves"] = [
        {
            **_curve(f, source, date),
            "collective": f.op_class,
            "group_size": n,
            "processes": over,
            "devices": mesh.devices,
        }
        for (n, over), f in fit.collectives
    ]
    _chip(content["chip"], fit, team, source, date)
    least = min((f.curve.points[0][1] for _, f in fit.collectives), default=0.0)
    content["topology"]["latency"] = _number(least, "s", source, date)
    if team.devices_per_process is not None:
        each = _number(team.devices_per_process, "count", source, date)
        content["topology"]["devices_per_process"] = each
    content["calibration"] = {
        "date": date,
        "machine": {
            **team.machine,
            "mesh": str(mesh),
            "engine": team.engine,
            "processes": team.processes,
            "devices_per_process": len(team.devices),
            "noisy": noise.noisy,
            "foreign": noise.foreign,
            "noise": noise.words,
        },
        "versions": versions(team.engine),
        "fit": {
            "method": METHOD,
            "quick": quick,
            "held_out_error": held_out(fit),
            "held_out": fit.held_out,
            "uncertainty": {name: f.uncertainty for name, f in fit.curves.items()},
        },
        "measurements": [dict(m) for m in measurements],
        "base": BASE,
    }
    content["notes"] = [
        f"{noise.words}.",
        f"Median error on held-out operations, which had no part in the fit: {held_out(fit):.1%}.",
    ]
    return content


def held_out(found: CalibrationFit) -> float:
    """Median relative error of the checks."""
    return median(abs(e) for e in found.held_out.values()) if found.held_out else 0.0


def _summary(team: Team) -> str:
    what = f"{team.kind.upper()}s" if team.accelerated else "cores as virtual devices"
    where = f"{team.machine['machines']} machines'" if "machines" in team.machine else "This machine's"
    return f"{where} {what}" + (f" of {team.processes} processes" if team.processes > 1 else "")


def _chip(chip: dict[str, Any], found: CalibrationFit, team: Team, source: str, date: str) -> None:
    """Rates of one device while all work, times the devices that share a core: a core's rates."""
    shared = 1.0 if team.accelerated else max(1.0, team.mesh.devices / team.machine["cores"])
    _memory(chip, team, source, date)
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


def _memory(chip: dict[str, Any], team: Team, source: str, date: str) -> None:
    """A device's memory, and the cores that devices share."""
    if team.accelerated:
        chip.pop("host_cores", None)
        taken = f"the memory of a {team.kind.upper()} that JAX allocates"
        chip["memory"] = _number(accelerator_memory_bytes(), "B", taken, date)
        chip["memory_reserve"] = _number(
            0.0, "B", "zero, because the memory above already excludes what JAX does not allocate", date
        )
        return
    chip["host_cores"] = _number(team.machine["cores"], "count", source, date)
    total = team.machine["memory_bytes"] / team.mesh.devices
    chip["memory"] = _number(total, "B", "physical memory of this machine, shared by the devices", date)
    chip["memory_reserve"] = _number(
        0.1 * total, "B", "assumption: the system and the runtime use a tenth of the memory", date
    )


def _curve(found: FittedCurve, source: str, date: str) -> dict[str, Any]:
    points = [[x, y] for x, y in found.curve.points]
    return {"points": points, "source": source, "date": date, "uncertainty": found.uncertainty}


def _constant(name: str, seconds: float, devices: int, source: str, date: str) -> dict[str, Any]:
    common = {"op_class": name, "dtype": "float32", "against": "bytes", "devices": devices}
    return {"points": [[0.0, seconds]], "source": source, "date": date, **common}


def _number(
    value: float, unit: str, source: str, date: str, uncertainty: float | None = None
) -> dict[str, Any]:
    made = {"value": value, "unit": unit, "source": source, "date": date}
    return made if uncertainty is None else {**made, "uncertainty": uncertainty}
