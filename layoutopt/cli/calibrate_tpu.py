"""`layoutopt calibrate --target`: the profile of a TPU from its compiler's estimates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from layoutopt.cli.options import check_out
from layoutopt.cli.progress import StepProgress
from layoutopt.cli.running import hushed, kept
from layoutopt.cli.terminal import Terminal, facts
from layoutopt.plan.units import rate_text, seconds_text
from reports.views.view import Column, Kind, View

if TYPE_CHECKING:
    from costmodels.calibration.tpu import TpuCalibration
    from costmodels.hardware import Hardware


def for_tpu(terminal: Terminal, target: str, refresh: bool, out: Path | None) -> None:
    """Fits the profile of a TPU, shows it, and writes it if requested."""
    from costmodels.calibration.tpu import calibrate_tpu
    from costmodels.calibration.tpu_compiled import known_target, shipped_probes
    from costmodels.hardware import write_profile
    from costmodels.hardware.profiles import made_profiles_directory
    from layoutopt.plan.hardware_results import CalibrateTpuResult

    known_target(target)
    check_out(out)
    partial = None
    if refresh or shipped_probes(target) is None:
        terminal.say(f"compiling small programs for {target}, which takes a few minutes")
        partial = made_profiles_directory() / f"{target}.partial.json"
        if partial.is_file():
            terminal.say(f"continuing from the estimates in {partial}")
    with kept(terminal, partial), StepProgress(terminal, f"compiling for {target}", 1, left=True) as bar:
        made = calibrate_tpu(
            target, refresh, lambda what, done, total: bar.update(done, what, total), hushed, partial
        )
    if made.shipped:
        terminal.say(
            f"fitting to the estimates that ship with layoutopt (probes compiled on {made.compiled.date} by "
            f"{made.compiled.compiler}); --refresh compiles the probes again on this machine"
        )
    else:
        _ship(terminal, made)
    with terminal.saved(out, lambda path: write_profile(made.content, path), "the profile"):
        terminal.result(CalibrateTpuResult(profile=None if out is None else str(out), **_summary(made)))
        if not terminal.as_json:
            _show(terminal, made)
    terminal.say(
        "no file was written; add --out PROFILE.json to save the profile"
        if out is None
        else f"to predict with this profile, use --hardware {out}"
    )


def _ship(terminal: Terminal, made: TpuCalibration) -> None:
    """Keeps new estimates for next time, if the project's own file can be written."""
    from costmodels.calibration.tpu_compiled import ship
    from mesh_tf_core import UserError

    try:
        terminal.say(f"wrote {ship(made.compiled)}")
    except UserError as error:
        terminal.say(f"warning: the estimates could not be saved for the next run: {error}")


def _summary(made: TpuCalibration) -> dict[str, Any]:
    found = made.content["calibration"]
    numbers = made.fit.numbers
    return {
        "hardware": made.content["name"],
        "topology": made.compiled.topology,
        "versions": found["versions"],
        "date": found["date"],
        "shipped": made.shipped,
        "launch_seconds": numbers.launch,
        "memory_efficiency": numbers.memory,
        "element_time": numbers.element,
        "matmul_efficiency": [list(point) for point in numbers.curve.points],
        "uncertainty": made.fit.uncertainty,
        "held_out_error": found["fit"]["held_out_error"],
        "typical_error": made.typical,
        "measurements": len(found["measurements"]),
    }


def _show(terminal: Terminal, made: TpuCalibration) -> None:
    from costmodels.hardware import load_hardware

    preset: Hardware = load_hardware(made.compiled.target)
    numbers, sure = made.fit.numbers, made.fit.uncertainty
    (small, low), (large, high) = numbers.curve.points[0], numbers.curve.points[-1]
    bandwidth = rate_text(preset.memory_bandwidth * numbers.memory, "B/s")
    terminal.show(
        facts(
            [
                ("compiled", f"for {made.compiled.topology} by {made.compiled.compiler}, not measured"),
                (
                    "launch",
                    f"{seconds_text(numbers.launch)} per kernel, ±{_percent(sure['launch_overhead'])}",
                ),
                (
                    "memory",
                    f"{_percent(numbers.memory)} ±{_percent(sure['memory_efficiency'])} of the peak "
                    f"({bandwidth})",
                ),
                (
                    "registers",
                    f"{seconds_text(1e6 * numbers.element)} for a million elements, "
                    f"±{_percent(sure['element_time'])}",
                ),
                (
                    "matmuls",
                    f"{_percent(low)} of the peak at {small:.2g} FLOPs to {_percent(high)} at {large:.2g}, "
                    f"±{_percent(sure['matmul_efficiency'])}",
                ),
                ("collectives", "as in the preset; the compiler does not estimate collectives"),
            ]
        ),
        "",
        View(
            "Typical error against the compiler's estimates",
            (Column("probes", "probes"), *(Column(k, k.replace("_", " "), Kind(_percent)) for k in SIDES)),
            [(kind, *(errors[side] for side in SIDES)) for kind, errors in made.typical.items()],
        ),
    )


SIDES = ("preset", "fitted", "held_out")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g}%"
