"""`--engine`: the same numbers from JAX as from TensorFlow, and what is kept of compiling."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from layoutopt.cli.options import EngineName
from mesh_tf_core.engines import KINDS, chosen
from mesh_tf_core.engines.jax import home
from tests.cli.engine_cases import TRAIN
from tests.jax_process import printed


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    found: dict[str, Any] = printed("tests.cli.engine_cases")
    return found


def test_the_option_names_the_engines_that_there_are() -> None:
    """The command line lists them without loading any."""
    assert tuple(name.value for name in EngineName) == KINDS


def test_losses_are_those_of_local(said: dict[str, Any], result: Callable[..., dict[str, Any]]) -> None:
    local = result(*TRAIN, "--engine", "local")
    assert said["train"]["loss"] == pytest.approx(local["loss"], rel=1e-5)
    assert said["train"]["held_out"] == pytest.approx(local["held_out"], rel=1e-5)
    assert len(local["loss"]) == 20


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
    monkeypatch.setattr(home, "_CHIPS", {"null": ("numpy",)})
    assert chosen("auto") == "jax"
    monkeypatch.setattr(home, "_CHIPS", {"null": ("no such package",), "no such file": ("numpy",)})
    assert chosen("auto") == "local"


def test_an_unknown_engine_is_refused(run: Callable[..., Result]) -> None:
    done = run("train", "examples/mlp.py", "--engine", "torch")
    assert done.exit_code == 2
    assert "'torch' is not one of" in done.stderr


def test_the_profile_of_another_engine_has_a_file_of_its_own(run: Callable[..., Result]) -> None:
    done = run("calibrate", "--engine", "jax", "--json")
    assert done.exit_code == 2
    assert "--out PROFILE.json" in json.loads(done.stderr)["error"]
