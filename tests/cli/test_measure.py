"""`measure` on real devices: the contract's JSON, bytes counted by the engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

MLP = "examples/mlp.py"
ON = ("--mesh", "data:2;model:2", "--layout", "batch:data;hidden:model")


def test_the_measured_json_is_the_contracts(result: Callable[..., dict[str, Any]]) -> None:
    found = result("measure", MLP, *ON, "--steps", "3")
    assert list(found) == [
        "format",
        "mesh",
        "layout",
        "step_seconds",
        "step_seconds_all",
        "compile_seconds",
        "loss",
        "communication_bytes_per_device",
        "peak_memory_bytes",
        "notes",
    ]
    assert found["mesh"] == {"data": 2, "model": 2}
    assert found["layout"] == {"batch": ["data"], "hidden": ["model"]}
    assert len(found["loss"]) == len(found["step_seconds_all"]) == 3
    assert found["step_seconds"] == statistics.median(found["step_seconds_all"])
    assert found["compile_seconds"] > 0
    priced = result("cost", MLP, *ON)["predicted"]
    assert found["communication_bytes_per_device"] == priced["communication_bytes_per_device"]
    assert found["peak_memory_bytes"] == priced["peak_memory_bytes"]


def test_measuring_starts_from_the_initial_values(result: Callable[..., dict[str, Any]]) -> None:
    measured = result("measure", MLP, *ON, "--steps", "3", "--warm-up", "4")["loss"]
    trained = result("train", MLP, *ON, "--steps", "3", "--held-out", "0")["loss"]
    assert measured == pytest.approx(trained, rel=1e-6)


def test_people_see_measured_beside_predicted(run: Callable[..., Result]) -> None:
    done = run("measure", MLP, *ON, "--steps", "2")
    assert done.exit_code == 0, done.stderr
    assert "measured, the median of 2" in done.stdout
    assert "for cpu-local" in done.stdout
    assert "(as predicted)" in done.stdout
    assert "loading TensorFlow and starting 4 devices" in done.stderr


def test_a_model_without_data_runs_on_zeros(run: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import mesh_tf_core as mtf\n\n"
        "def model(batch: int = 4) -> mtf.Model:\n"
        "    g = mtf.Graph('one')\n"
        "    b, n = mtf.Dim('batch', batch), mtf.Dim('n', 8)\n"
        "    x, w = g.input('x', [b, n], 'float32'), g.variable('w', [n], mtf.ONES)\n"
        "    return mtf.Model(mtf.reduce_mean(mtf.einsum([x, w], [b])))\n",
        encoding="utf-8",
    )
    done = run("measure", str(file), "--mesh", "data:2", "--layout", "batch:data", "--steps", "1")
    assert done.exit_code == 0, done.stderr
    assert "defines no data(), so the steps run on zeros" in done.stderr
    assert "0.0000 at the first" in done.stdout
