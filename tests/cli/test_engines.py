"""`--engine`: the same numbers from JAX as from TensorFlow, and what is kept of compiling."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import Result

from layoutopt.cli.given import LayoutByHand
from layoutopt.cli.listing import COMMANDS, PLANNING
from layoutopt.cli.options import EngineName
from layoutopt.cli.running import Session
from layoutopt.cli.terminal import Terminal
from layoutopt.plan import build
from mesh_tf_core.engines import KINDS, chosen
from mesh_tf_core.engines.jax import compat
from tests.cli.engine_cases import MLP, TRAIN
from tests.jax_process import printed


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    found: dict[str, Any] = printed("tests.cli.engine_cases")
    return found


def test_the_option_names_the_engines_that_there_are() -> None:
    """The command line lists them without loading any."""
    assert get_args(EngineName) == KINDS


@pytest.mark.nightly
def test_losses_are_those_of_local(said: dict[str, Any], result: Callable[..., dict[str, Any]]) -> None:
    local = result(*TRAIN, "--engine", "local")
    assert said["train"]["loss"] == pytest.approx(local["loss"], rel=1e-5)
    assert said["train"]["held_out"] == pytest.approx(local["held_out"], rel=1e-5)
    assert len(local["loss"]) == 20


@pytest.mark.nightly
def test_measure_counts_what_jax_sends_and_holds(said: dict[str, Any]) -> None:
    found = said["measure"]
    assert found["communication_bytes_per_device"]["data"] > 0
    assert found["peak_memory_bytes"] > 0 and found["compile_seconds"] > 0
    assert len(found["step_seconds_all"]) == 2


def test_validate_runs_layouts(said: dict[str, Any]) -> None:
    assert len(said["validate"]["rows"]) == 2
    assert all(row["measured_seconds"] > 0 for row in said["validate"]["rows"])


def test_compiled_steps_are_kept_for_the_user_alone(said: dict[str, Any]) -> None:
    mode, files = said["kept"]
    assert (mode, files > 0) == ("0o700", True)


def test_what_was_cut_off_is_written_anew(said: dict[str, Any]) -> None:
    assert said["again"] == pytest.approx([1.0, 1.0], abs=0.05)


def test_no_tensorflow_is_loaded(said: dict[str, Any]) -> None:
    assert said["libraries"] == ["jax"]


def test_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert chosen("auto") == "local"
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert (chosen("auto"), chosen("local")) == ("jax", "local")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(compat, "_CHIPS", {"null": ("numpy",)})
    assert chosen("auto") == "jax"
    monkeypatch.setattr(compat, "_CHIPS", {"null": ("no such package",), "no such file": ("numpy",)})
    assert chosen("auto") == "local"


@pytest.mark.parametrize("command", [name for panel in COMMANDS.values() for name in panel])
@pytest.mark.one_in(4)
def test_planning_takes_no_accelerator(
    command: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model files may start JAX; where there is an accelerator, commands that run on devices may use it."""
    for chips, runs_on in (({"null": ("numpy",)}, None), ({}, "cpu")):
        monkeypatch.setattr(compat, "_CHIPS", chips)
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        run(command, "--no-such-option")
        assert os.environ.get("JAX_PLATFORMS") == ("cpu" if command in PLANNING else runs_on)


def test_an_unknown_engine_is_refused(run: Callable[..., Result]) -> None:
    done = run("train", "examples/mlp.py", "--engine", "torch")
    assert done.exit_code == 2
    assert "'torch' is not one of" in done.stderr


def test_the_profile_of_another_engine_has_a_file_of_its_own(run: Callable[..., Result]) -> None:
    done = run("calibrate", "--engine", "jax", "--json")
    assert done.exit_code == 2
    assert "--out PROFILE.json" in json.loads(done.stderr)["error"]


def test_a_plan_is_read_once(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """JAX's devices, which are those of its mesh, come before the model that it is checked against."""
    plan, begun = str(tmp_path / "plan.json"), list[Any]()
    assert run("search", MLP, "--mesh", "data:2", "--out", plan, "--quiet").exit_code == 0
    read = build.load_plan
    monkeypatch.setattr(build, "load_plan", lambda path, *told: begun.append(path) or read(path, *told))
    monkeypatch.setattr(Session, "start", lambda _, count: begun.append(count))
    session = Session(Terminal(quiet=True), "jax")
    given = LayoutByHand(None, plan).read(session.load(MLP, (), None, plan), session.plan)
    assert begun == [plan, 2] and given.plan is not None and str(given.mesh) == "data:2"


@pytest.mark.parametrize("option", ["--timeout", "--start-timeout"])
def test_how_long_others_are_waited_for_needs_others(option: str, refused: Callable[..., str]) -> None:
    assert "for each other; add --cluster (or" in refused("train", MLP, "--mesh", "data:2", option, "50")


def test_what_happens_until_the_first_loss_is_said(run: Callable[..., Result]) -> None:
    done = run("train", MLP, "--mesh", "data:2", "--steps", "20", "--held-out", "1", "--engine", "lockstep")
    first, *rest = done.stderr.splitlines()[:6]
    assert [first, *(line.partition(":")[0] for line in rest)] == [
        "searching the layout", "layout", "starting 2 devices of NumPy",
        "lowering the model and initialising its variables", "compiling the step", "step 1/20",
    ]  # fmt: skip
    assert done.stderr.splitlines()[-1] == "evaluating on held-out data"


def test_recorded_steps_lie_beside_the_predicted_one(said: dict[str, Any]) -> None:
    """Of every device, from the first work of the first step on."""
    events = said["traced"]
    homes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(homes) == [
        "predicted: one device of data:2;model:4, cpu-local", "measured: host",
        *(f"measured: CPU:{n}" for n in range(8)),
    ]  # fmt: skip
    slices = [e for e in events if e["ph"] == "X"]
    begins = {pid: min(e["ts"] for e in slices if e["pid"] == pid) for pid in homes.values()}
    first, host, *devices = begins.values()
    assert first == min(devices) and host < first
    steps = [e["name"] for e in slices if e["pid"] == homes["measured: host"]]
    assert steps == ["step 4", "step 5", "step 6"]  # after one that warms up, and two that are timed


def test_only_jax_records_its_steps(refused: Callable[..., str], tmp_path: Path) -> None:
    words = ("measure", MLP, "--mesh", "data:2", "--engine", "local", "--trace")
    assert "--trace records only what JAX runs, but the engine is 'local'; add --engine jax" in refused(
        *words, "x"
    )
    (tmp_path / "file").write_text("no folder")
    words = (*words[:5], "jax", "--trace")
    assert "--trace" in refused(*words, str(tmp_path / "file"))
