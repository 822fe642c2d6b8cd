"""The decoder language model under many layouts: the dense losses and weights, also with dropout and in
bfloat16."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from examples.transformer_lm import data, model
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower.verify import verify
from tests.examples.helper import SMALL
from tests.marks import by_day

LAYOUTS = [
    ("x:2;y:2", "batch:x"),
    ("x:2;y:2", "batch:x+y"),
    ("x:2;y:2", "d_ff:x;heads:x;vocab:x"),
    ("x:2;y:2", "batch:x;d_ff:y;heads:y;vocab:y"),
    ("x:2;y:4", "batch:x;d_ff:y;heads:y;vocab:y"),
    ("x:2;y:4", "batch:y;d_ff:x;heads:x;vocab:x"),
    ("x:2;y:4", "d_model:y;batch:x"),
    ("x:2;y:4", "d_model:x+y"),
    ("x:2;y:2", "length:x;batch:y"),
    ("x:2;y:2", "memory_length:x;batch:y;vocab:x"),
    ("x:2;y:2", "length:x;memory_length:y;d_ff:y;vocab:y"),
    ("x:2;y:4", "batch:x;d_kv:y;vocab:y;d_ff:y"),
    ("x:2;y:4", "vocab:y+x;d_ff:x+y"),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.2},
    "gated, grouped, tied": {"gated": True, "kv_heads": 2, "tied": True, "positions": "none"},
    "adafactor": {"optimizer": "adafactor", "positions": "16"},
}


def batches(count: int = 3) -> list[dict[str, Any]]:
    source = data(batch=8, length=8, vocab=32)
    return [next(source) for _ in range(count)]


def train(
    hparams: dict[str, Any], mesh: str, layout: str, **options: Any
) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps, and the variables afterwards."""
    built = model(**{**SMALL, **hparams})
    program = verify(built.lower(mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(**options)))
    engine = LockstepEngine(program)
    losses = []
    for batch in batches():
        # With microbatches, a batch comes as parts along a first dimension of its own.
        batch = {n: x.reshape(program.values[program.feeds[n]].shape.sizes) for n, x in batch.items()}
        losses.append(float(engine.step(batch)["loss"]))
        assert engine.communication_bytes == program.communication_bytes()
    return losses, {name: engine.read(name) for name in program.variables}


@pytest.fixture(scope="module")
def dense() -> dict[str, tuple[list[float], dict[str, Any]]]:
    return {name: train(hparams, "one:1", "") for name, hparams in VARIANTS.items()}


TASKS = [("plain", mesh, layout) for mesh, layout in LAYOUTS] + [
    (variant, *LAYOUTS[i]) for variant in VARIANTS for i in (3, 5, 6, 8) if variant != "plain"
]


@pytest.mark.parametrize(("variant", "mesh", "layout"), by_day(TASKS, every=5))
@pytest.mark.one_in(4)
def test_layouts(variant: str, mesh: str, layout: str, dense: dict[str, Any]) -> None:
    hparams = VARIANTS[variant]
    losses, variables = train(hparams, mesh, layout)
    want_losses, want = dense[variant]
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
    assert variables.keys() == want.keys()
    for name, value in variables.items():
        # Adam divides by the root of tiny second moments: noise of a gradient shows at 1e-3 of a step.
        np.testing.assert_allclose(value, want[name], atol=3e-4, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize(("mesh", "layout"), by_day([LAYOUTS[i] for i in (1, 3, 6, 8)], first=1))
def test_bfloat16(mesh: str, layout: str, dense: dict[str, Any]) -> None:
    """Activations of eight bits of mantissa; master weights and updates stay float32."""
    hparams = {"dtype": "bfloat16", "learning_rate": 0.001}
    low, _ = train(hparams, "one:1", "")
    losses, variables = train(hparams, mesh, layout)
    np.testing.assert_allclose(losses, low, rtol=5e-3)
    np.testing.assert_allclose(losses[0], dense["plain"][0][0], rtol=1e-3)
    assert {v.dtype for n, v in variables.items() if n != "step"} == {np.dtype(np.float32)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variant", ["plain", "dropout"])
@pytest.mark.parametrize("at", by_day([0, 3, 8], first=1))
def test_recompute_changes_nothing(variant: str, at: int) -> None:
    mesh, layout = LAYOUTS[at]
    kept, kept_variables = train(VARIANTS[variant], mesh, layout)
    again, variables = train(VARIANTS[variant], mesh, layout, recompute=frozenset({"layers"}))
    assert again == kept
    for name, value in variables.items():
        np.testing.assert_array_equal(value, kept_variables[name], err_msg=name)


def test_recompute_saves_only_the_carry() -> None:
    built = model(**SMALL)
    mesh, layout = mtf.Mesh("x:2"), mtf.Layout("batch:x")

    def saved(recompute: frozenset[str]) -> int:
        program = built.lower(mesh, layout, mtf.Options(recompute=recompute))
        loops = [i for i, _ in program.walk() if hasattr(i, "stacked") and not i.reverse]
        return sum(program.values[r.outer].local_bytes(mesh) for loop in loops for r in loop.stacked)

    kept = saved(frozenset({"layers"}))
    assert kept == 2 * 4 * 8 * 16 * 4
    assert saved(frozenset()) > 5 * kept


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("variant", "at"), [("plain", 1), ("dropout", 3), ("adafactor", 0)])
@pytest.mark.one_in(4)
def test_split_storage_changes_nothing(stage: int, variant: str, at: int, dense: dict[str, Any]) -> None:
    """Optimizer state, gradients and variables split over the axes that the layout leaves (ZeRO 1 to 3)."""
    mesh, layout = LAYOUTS[at]
    names = [v for v in model(**{**SMALL, **VARIANTS[variant]}).graph.variables if v != "step"]
    losses, variables = train(VARIANTS[variant], mesh, layout, storage=dict.fromkeys(names, stage))
    want_losses, want = dense[variant]
    np.testing.assert_allclose(losses, want_losses, rtol=2e-5)
    for name, value in variables.items():
        np.testing.assert_allclose(value, want[name], atol=3e-4, rtol=1e-3, err_msg=name)


def test_storage_with_recompute(dense: dict[str, Any]) -> None:
    names = [v for v in model(**SMALL).graph.variables if v != "step"]
    options = {"storage": dict.fromkeys(names, 3), "recompute": frozenset({"layers"})}
    losses, _ = train({}, "x:2;y:4", "batch:x;d_ff:y;heads:y;vocab:y", **options)
    np.testing.assert_allclose(losses, dense["plain"][0], rtol=2e-5)


@pytest.mark.parametrize(("mesh", "layout"), [LAYOUTS[i] for i in (0, 2, 3, 8)])
@pytest.mark.parametrize("parts", by_day([2, 4], first=1))
@pytest.mark.one_in(4)
def test_microbatches_change_nothing(parts: int, mesh: str, layout: str, dense: dict[str, Any]) -> None:
    losses, variables = train({}, mesh, layout, microbatches=parts)
    np.testing.assert_allclose(losses, dense["plain"][0], rtol=2e-5)
    for name, value in variables.items():
        np.testing.assert_allclose(value, dense["plain"][1][name], atol=3e-4, rtol=1e-3, err_msg=name)


PAPER = Path(__file__).parents[1] / "data" / "mesh_tf_param_counts.csv"


def paper_rows() -> list[dict[str, str]]:
    lines = [line for line in PAPER.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [row for row in csv.DictReader(lines) if row["task"] == "lm_decoder"]


@pytest.mark.parametrize("row", paper_rows(), ids=lambda row: row["published_B"])
def test_parameter_counts_of_the_paper(row: dict[str, str]) -> None:
    names = ("layers", "d_model", "d_kv", "heads", "d_ff", "vocab")
    built = model(
        **{n: int(row[n]) for n in names}, batch=int(row["batch_sequences"]), length=int(row["seq_len"])
    )
    assert built.parameters == int(row["computed_params"])


def test_all_seven_models_of_the_paper() -> None:
    assert len(paper_rows()) == 7


def test_bad_sizes() -> None:
    with pytest.raises(mtf.UserError, match="heads=4 must be a multiple of kv_heads=3"):
        model(**{**SMALL, "kv_heads": 3})
    with pytest.raises(mtf.UserError, match="LearnedPositions: count=4 is less than length="):
        model(**{**SMALL, "positions": "4"})
