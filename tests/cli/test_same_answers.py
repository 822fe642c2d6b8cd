"""What a command prints is what the function of the same name answers in Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import layoutopt
import mesh_tf_core as mtf
from examples.transformer_lm import model as transformer_lm
from layoutopt.analysis import validate as validation
from layoutopt.analysis.verify import Verified
from layoutopt.api.pricing import PricedLayout
from layoutopt.cli.terminal import plain
from layoutopt.models.loading import load_model
from layoutopt.plan.results import ValidateResult
from mesh_tf_core.engines.jax.compile import CompilerRefusal

MLP, MESH = "examples/mlp.py", "data:2;model:2"
FEW = ("--storage", "layout,zero1", "--recompute", "never", "--microbatches", "1")
SPACE = layoutopt.SearchSpace(storage="layout,zero1", recompute="never", microbatches="1")  # type: ignore[arg-type]
TAKEN = {"wall_seconds", "search", "source", "source_sha256"}
"""What takes time, and what was typed."""


def without(found: Any) -> Any:
    """JSON without what differs from run to run."""
    if isinstance(found, dict):
        return {k: without(v) for k, v in found.items() if k not in TAKEN}
    return [without(each) for each in found] if isinstance(found, list) else found


@pytest.fixture
def printed(run: Callable[..., Result]) -> Callable[..., Any]:
    """What a command prints as JSON."""

    def invoke(*args: str) -> Any:
        done = run(*args, "--json", "--quiet")
        assert done.exit_code == 0, done.stderr
        return without(json.loads(done.stdout))

    return invoke


def said(found: Any) -> Any:
    return without(json.loads(json.dumps(plain(found.to_json()))))


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return load_model(MLP, ()).model


def test_search(printed: Callable[..., Any], model: mtf.Model) -> None:
    limits = layoutopt.Limits(top=2)
    found = layoutopt.search(model, MESH, hardware="tpu-v3", space=SPACE, limits=limits)
    assert printed("search", MLP, "--mesh", MESH, "--hardware", "tpu-v3", "--top", "2", *FEW) == said(found)


def test_cost(printed: Callable[..., Any], model: mtf.Model) -> None:
    args = ("cost", MLP, "--mesh", MESH, "--layout", "batch:data", "--hardware", "tpu-v3", "--memory", "1KiB")
    found = layoutopt.cost(model, MESH, "batch:data", "tpu-v3", 1024, storage="zero1", microbatches=2)
    assert printed(*args, "--storage", "zero1", "--microbatches", "2") == said(found)
    assert not found.fits and found.findings


@pytest.mark.nightly
def test_lint(printed: Callable[..., Any], model: mtf.Model) -> None:
    found = layoutopt.lint(model, MESH, "batch:data", "tpu-v3")
    assert printed("lint", MLP, "--mesh", MESH, "--layout", "batch:data", "--hardware", "tpu-v3") == said(
        found
    )
    assert "slower" in {each.kind for each in found.findings} and "the best step" in repr(found)
    assert found.to_frame()["kind"].tolist() == [each.kind for each in found.findings]


def test_explain(printed: Callable[..., Any], model: mtf.Model, tmp_path: Path) -> None:
    plan = layoutopt.search(model, MESH, hardware="tpu-v3", space=SPACE)
    plan.save(tmp_path / "plan.json")
    asked: dict[str, Any] = {"against": "batch:data", "pins": ["batch:none"], "without": ["all"]}
    found = layoutopt.explain(plan, **asked, check=True)
    args = ("--against", "batch:data", "--pin", "batch:none", "--without", "all", "--check", "--model", MLP)
    assert printed("explain", str(tmp_path / "plan.json"), *args) == said(found)
    assert found.proof is not None and found.proof.verified


def test_size(printed: Callable[..., Any]) -> None:
    asked: dict[str, Any] = {"tokens": 1e6, "devices": 2, "hardware": "tpu-v3", "candidates": 1}
    small = dict.fromkeys(("layers", "d_model", "d_kv", "heads", "d_ff", "vocab", "batch", "length"), 4)
    found = layoutopt.size(transformer_lm, small, space=SPACE, **asked)
    args = ("--tokens", "1M", "--devices", "2", "--hardware", "tpu-v3", "--candidates", "1")
    settings = [word for name, n in small.items() for word in ("--set", f"{name}={n}")]
    assert printed("size", "examples/transformer_lm.py", *args, *settings, *FEW) == said(found.data)


def test_validate(printed: Callable[..., Any], model: mtf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times differ: the measurements are given."""
    row = {"layout": "batch:data", "predicted_seconds": 1.0, "measured_seconds": 2.0, "name": "given"}
    noise = {"noisy": False, "foreign": 0.0, "spread": 0.0, "words": "quiet", "drift": None}
    summary = {"mape": 0.5, "kendall_tau": 1.0, "spearman": 1.0, "regret": 0.0, "noise": noise, "notes": []}
    asked: list[Any] = []

    def measured(model: Any, mesh: Any, machine: Any, layouts: Any, runs: Any, *_: Any) -> ValidateResult:
        asked.append(runs)
        return ValidateResult.model_validate({"rows": [row, row], **summary})

    monkeypatch.setattr(validation, "validate", measured)
    found = layoutopt.validate(model, MESH, count=3, steps=2)
    assert printed("validate", MLP, "--mesh", MESH, "--layouts", "3", "--steps", "2") == said(found)
    assert [(each.count, each.steps, each.seed) for each in asked] == [(3, 2, 0)] * 2


def test_verify(printed: Callable[..., Any], model: mtf.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is not needed: what it says is given."""

    def compiled(priced: Any, topology: str, *_: Any) -> Verified:
        of = priced.evaluation if isinstance(priced, PricedLayout) else priced
        return Verified(topology, of.cost.compute_seconds, (), None, CompilerRefusal("no room", True), (), of)

    monkeypatch.setattr("layoutopt.api.running.compiled", compiled)
    found = layoutopt.verify(layoutopt.cost(model, MESH, "batch:data"), "v5e:2x2")
    assert said(found)["reason"] == "no room"
    monkeypatch.setattr("layoutopt.cli.verify._verdict", lambda found: "refused")
    with pytest.raises(AssertionError, match="refused"):  # the verdict is an error of the command
        printed("verify", MLP, "--mesh", MESH, "--layout", "batch:data", "--topology", "v5e:2x2")


def test_commands_and_functions_are_the_same() -> None:
    functions = {"search", "cost", "lint", "explain", "size", "validate", "verify"}
    assert functions <= {*layoutopt.__all__} and all(f"test_{name}" in globals() for name in functions)
