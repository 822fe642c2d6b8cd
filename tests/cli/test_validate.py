"""`validate`: summary numbers against known answers, layouts that are legal, real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt.analysis.validate import sample_layouts, summary
from layoutopt.cli.terminal import Terminal
from layoutopt.cli.validate import _show
from layoutopt.models.loading import load_model
from layoutopt.plan.evidence import MeasuredLayout, Noise


def rows(*pairs: tuple[float, float]) -> list[MeasuredLayout]:
    return [
        MeasuredLayout(layout=f"layout {n}", predicted_seconds=predicted, measured_seconds=measured)
        for n, (predicted, measured) in enumerate(pairs)
    ]


def test_a_perfect_model() -> None:
    found = summary(rows((1, 1), (2, 2), (3, 3)))
    assert (found.mape, found.kendall_tau, found.spearman, found.regret) == (0, 1, 1, 0)


def test_known_answers() -> None:
    found = summary(rows((1, 2), (2, 1), (4, 4)))
    assert found.mape == pytest.approx((0.5 + 1 + 0) / 3)
    assert found.kendall_tau == pytest.approx(1 / 3)
    assert found.spearman == pytest.approx(0.5)
    assert found.regret == pytest.approx(1.0)
    said = {"layout": "layout 0", "predicted_seconds": 1, "measured_seconds": 2}
    assert found.rows[0].to_json() == said


def test_no_order_has_no_correlation() -> None:
    found = summary(rows((1, 2), (1, 3)))
    assert found.kendall_tau is None and found.spearman is None


def test_sampled_layouts_are_legal_different_and_repeatable() -> None:
    model, mesh = load_model("examples/mlp.py").model, mtf.Mesh("data:2;model:2")
    found = sample_layouts(model, mesh, 15)
    assert len(set(found)) == 15
    assert found == sample_layouts(model, mesh, 15)
    assert found != sample_layouts(model, mesh, 15, seed=1)
    assert mtf.Layout() in found and mtf.Layout("batch:data+model") in found
    for layout in found:
        model.lower(mesh, layout)


def test_the_json_is_the_contracts(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "validation.json"
    found = result(
        "validate",
        "examples/mlp.py",
        "--mesh",
        "data:2",
        "--layouts",
        "3",
        "--steps",
        "2",
        "--out",
        str(out),
    )
    assert {"rows", "mape", "kendall_tau", "spearman", "regret"} <= set(found)
    assert len(found["rows"]) == 3
    for row in found["rows"]:
        assert {"layout", "predicted_seconds", "measured_seconds"} <= set(row)
    assert all(row["measured_seconds"] > 0 for row in found["rows"])
    assert found["regret"] >= 0
    assert json.loads(out.read_text(encoding="utf-8")) == found


def test_a_machine_that_is_not_calibrated_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary(rows((3.0, 1.0), (4.0, 2.0)), Noise(words="quiet"))
    for calibrated in (False, True):
        _show(Terminal(), found, replace(load_hardware("cpu-local"), calibrated=calibrated))
        said = "cpu-local (not calibrated; run `layoutopt calibrate` first)"
        assert (said in capsys.readouterr().out) is not calibrated


def test_wrong_input(refused: Callable[..., str]) -> None:
    assert "--mesh is missing" in refused("validate", "examples/mlp.py")
    assert "--layouts" in refused("validate", "examples/mlp.py", "--mesh", "data:2", "--layouts", "1")
