"""Measured and predicted step times that are far apart: what `train`, `measure` and `validate` say of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import Result

from costmodels.calibration import TimingSample
from costmodels.calibration.runner import machine
from costmodels.hardware import Calibration, Hardware, load_hardware
from layoutopt.analysis.difference import difference_notes
from layoutopt.cli.running import Timed
from layoutopt.cli.training_run import TrainingRun
from mesh_tf_core import Mesh

MESH = Mesh("data:2;model:2")
RUN = ("examples/mlp.py", "--mesh", str(MESH))
COMMANDS = {
    "train": ("--layout", "batch:data", "--steps", "2", "--held-out", "0"),
    "measure": ("--layout", "batch:data", "--steps", "2"),
    "validate": ("--layouts", "2", "--steps", "2"),
}
CALIBRATE = 'run `layoutopt calibrate --mesh "data:2;model:2"`'


def calibrated(**changed: Any) -> Hardware:
    """A profile of this machine, for the mesh and the engine of the run, or of other conditions."""
    made = {**machine(), "mesh": str(MESH), "engine": "local", "foreign": 0.03, **changed}
    of = Calibration("2026-11-28", json.dumps(made), "{}", "{}", "[]", "cpu-local")
    return replace(load_hardware("cpu-local"), calibrated=True, calibration=of)


def note(measured: float = 9.0, hardware: Hardware | None = None, engine: str = "local", **more: Any) -> str:
    times = more.pop("times", [(1.0, measured)])
    return " ".join(difference_notes(times, MESH, engine, hardware or calibrated(), **more))


@pytest.mark.parametrize("measured", [0.7, 1.0, 1.45, 0.0, float("nan")])
def test_near_times_and_missing_ones_have_no_note(measured: float) -> None:
    assert note(measured, load=0.9, drift=2.0, compiled=True) == ""


def test_far_times_either_way_have_one() -> None:
    assert note(5.0).startswith("a step took 5.00 s, 5.0 times the predicted 1.00 s")
    assert note(0.5).startswith("a step took 500 ms, 0.50 times the predicted 1.00 s")
    several = note(times=[(1.0, 1.0), (1.0, 0.2), (2.0, 4.0)])
    assert several.startswith("in 2 of 3 layouts the measured and predicted times differ by more than half")
    assert "at worst, a step took 200 ms" in several


CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "The cause is unknown"),
    "idle": (
        {"load": 0.02},
        "Other processes used 2% of the cores during the steps and 3% during calibration",
    ),
    "load": ({"load": 0.8}, "80% of the cores during the steps and 3% during calibration: close them, then"),
    "load then": (
        {"load": 0.0, "hardware": calibrated(foreign=0.8)},
        "0% of the cores during the steps and 80% during calibration: close them, then calibrate and measure",
    ),
    "preset": (
        {"hardware": load_hardware("cpu-local")},
        f"cpu-local is not calibrated for this machine: {CALIBRATE}",
    ),
    "processor": (
        {"hardware": calibrated(processor="another")},
        "cpu-local was calibrated on processor another",
    ),
    "cores": ({"hardware": calibrated(cores=999)}, "was calibrated on cores 999 (here "),
    "mesh": (
        {"hardware": calibrated(mesh="a:2")},
        f"on mesh a:2 (here {MESH}): {CALIBRATE}",
    ),
    "engine": (
        {"engine": "jax", "hardware": load_hardware("cpu-jax")},
        'calibrate --mesh "data:2;model:2" --engine jax --out PROFILE.json`',
    ),
    "elsewhere": (
        {"hardware": load_hardware("tpu-v3"), "load": 0.8},
        "The prediction is for tpu-v3, but the steps ran on other devices",
    ),
    "compiled": ({"compiled": True}, "The only step includes compilation: train for more steps"),
    "drift": ({"drift": 1.8}, f"The calibration's reference takes 1.8 times as long now: {CALIBRATE}"),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_note_says_what_may_be_why(case: str) -> None:
    given, said = CAUSES[case]
    found = note(**given)
    assert said in found
    others = {words for _, words in CAUSES.values()} - {said}
    assert not any(words in found for words in others)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_say_it_in_text_and_json(
    command: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times and the load are given."""
    taken = TimingSample(9.0, 1.0, 0.8 * 9.0 * 2, 2)
    monkeypatch.setattr("costmodels.calibration.clock.started", lambda: lambda steps: taken)
    monkeypatch.setattr(TrainingRun, "step_seconds", 9.0)
    monkeypatch.setattr(
        "layoutopt.cli.measure.timed_steps", lambda *_: Timed((9.0, 9.0), (1.0, 1.0), taken.foreign_share)
    )
    monkeypatch.setattr(
        "layoutopt.analysis.validate.run", lambda model, team, chosen, *_: [[taken]] * len(chosen)
    )
    printed = run(command, *RUN, *COMMANDS[command])
    (found,) = json.loads(run(command, *RUN, *COMMANDS[command], "--json").stdout)["notes"]
    assert f"note: {found}" in " ".join(printed.stdout.split())
    assert "cpu-local is not calibrated for this machine" in found
    assert "Other processes used 80% of the cores during the steps: close them, then measure again" in found
