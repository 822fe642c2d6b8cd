"""`layoutopt calibrate`: measures this machine's mesh, or uses the TPU compiler, and fits the profile for
predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli import options
from layoutopt.cli.calibrate_tpu import for_tpu
from layoutopt.cli.grouped import grouped
from layoutopt.cli.job import ALONE, Job
from layoutopt.cli.progress import StepProgress
from layoutopt.cli.running import Session, kept
from layoutopt.cli.terminal import Terminal, facts
from layoutopt.plan.units import bytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from mesh_tf_core import Mesh

DEFAULT_MESH = "data:2;model:4"


@grouped
def calibrate(
    mesh: options.MeshOption = None,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="Measure more sizes, with more repetitions (takes a few minutes)."),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="TPU",
            help="Fit a profile of this TPU, e.g. tpu-v5e, to its compiler's estimates instead of timing "
            "this machine (no TPU is needed).",
        ),
    ] = None,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="Compile the probes again instead of reading the shipped estimates (with --target; takes "
            "a few minutes).",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        options.path_option(
            "PROFILE.json",
            "Write the profile to this file.",
            show_default="the cached profile of cpu-local; with --target, no file",
        ),
    ] = None,
    job: Job = ALONE,
    output: options.Output = options.OUTPUT,
) -> None:
    """Fit a hardware profile to measurements of this machine, or to the TPU compiler's estimates."""
    from mesh_tf_core import UserError
    from mesh_tf_core.engines import chosen

    if target is not None:
        if mesh is not None or thorough:
            raise UserError(
                f"--mesh and --thorough measure this machine, but --target {target} compiles for a "
                "TPU; remove --target, or remove --mesh and --thorough"
            )
        if job.several:
            raise UserError(
                f"--target {target} compiles for a TPU in one process; remove --cluster, or run "
                "calibrate without launch"
            )
        for_tpu(output.terminal, target, refresh, out)
        return
    if refresh:
        raise UserError("--refresh needs a TPU to compile for; add --target, e.g. --target tpu-v5e")
    if not job.several and out is None and (kind := chosen(job.engine)) != "local":
        raise UserError(
            f"the profile {options.THIS_MACHINE} describes the engine local, but this run measures the "
            f"engine {kind}; write the profile to another file with --out PROFILE.json"
        )
    if job.several and out is None:
        raise UserError(
            f"the profile {options.THIS_MACHINE} describes one process, but --cluster measures several; "
            "write the profile to another file with --out PROFILE.json"
        )
    where = options.read_mesh(DEFAULT_MESH if mesh is None else mesh)
    with job.open(output) as session:
        if session.cluster is not None:
            # First of all: what fails then ends the others too.
            session.start(where.devices)
        if session.cluster is None or session.cluster.is_writer:
            _this_machine(session, where, thorough, out)
        else:
            _measured(session, where, thorough, None)


def _this_machine(session: Session, mesh: Mesh, thorough: bool, out: Path | None) -> None:
    from costmodels.hardware import profile_of, write_profile
    from costmodels.hardware.profiles import made_profiles_directory
    from layoutopt.plan.hardware_results import CalibrateResult

    terminal = session.terminal
    target = out or made_profiles_directory() / f"{options.THIS_MACHINE}.json"
    options.check_out(target)
    # A pipe has no folder for what was measured so far.
    is_file = target.is_file() or not target.exists()
    partial = target.with_name(f"{target.stem}.partial.json") if is_file else None
    if partial is not None and partial.is_file():
        terminal.say(f"continuing from the measurements in {partial}")
    with kept(terminal, partial):
        content = _measured(session, mesh, thorough, partial)
    with terminal.saved(target, lambda path: write_profile(content, path), "the profile"):
        terminal.result(CalibrateResult(profile=str(target), **_summary(content)))
        if not terminal.as_json:
            _show(terminal, profile_of(content, target), content)
    used = f"--hardware {out}" if out is not None else f"--hardware {options.THIS_MACHINE}, the default,"
    terminal.say(f"{used} now uses this profile")


def _measured(session: Session, mesh: Mesh, thorough: bool, partial: Path | None) -> dict[str, Any]:
    if session.cluster is None:
        session.start(mesh.devices)
    from costmodels.calibration import calibrate as measure

    with StepProgress(session.terminal, "calibrating", 1, left=True) as bar:
        return measure(
            mesh,
            lambda what, done, total: bar.update(done, what, total),
            quick=not thorough,
            resume=partial,
            cluster=session.cluster,
            engine=session.engine,
        )


def _summary(content: dict[str, Any]) -> dict[str, Any]:
    found = content["calibration"]
    return {
        "hardware": content["name"],
        "machine": found["machine"],
        "versions": found["versions"],
        "held_out_error": found["fit"]["held_out_error"],
        "measurements": len(found["measurements"]),
    }


def _show(terminal: Terminal, machine: Hardware, content: dict[str, Any]) -> None:
    found = _summary(content)
    where = found["machine"]
    terminal.show(
        facts(
            [
                ("machine", f"{where['processor']}, {where['cores']} cores"),
                ("mesh", f"{where['mesh']}{_dealt(where)}; {where['noise']}"),
                ("matmuls", f"{rate_text(machine.peak_flops('float32'), 'FLOP/s')} per core, float32"),
                ("memory", f"{rate_text(machine.memory_bandwidth, 'B/s')} per core"),
                ("", f"{bytes_text(machine.usable_memory_bytes)} usable per device"),
                ("launch", seconds_text(machine.chip.launch_overhead.value)),
                ("collectives", f"{len(machine.collective_curves)} measured"),
                (
                    "fit",
                    f"{found['measurements']} measurements; held-out error "
                    f"{100 * found['held_out_error']:.1f}%",
                ),
            ]
        )
    )


def _dealt(where: dict[str, Any]) -> str:
    """How devices are dealt out to processes."""
    if where["processes"] == 1:
        return ""
    return f" over {where['processes']} processes with {where['devices_per_process']} devices each"
