"""Recipes of examples/recipes.py with trained models: they evaluate, tune, continue, end in time."""

from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.training import array_files
from tests.core.saved import whole
from tests.layers.recipes import RECIPES, D, X

OUT = mtf.Dim("out", 4)


def regression(name: str = "", ema: float = 0.0) -> mtf.Model:
    """A map with a frozen weight and adapters, or the map alone."""
    g = mtf.Graph()
    x, y = (g.input(n, [mtf.Dim("batch", 4), d], "float32") for n, d in (("x", D), ("y", OUT)))
    if name:
        with g.frozen():
            w = g.variable("w", [D, OUT], mtf.ZEROS)
        made = RECIPES["adapted"](x, w, 2, [OUT], name)
    else:
        made = mtf.einsum([x, g.variable("w", [D, OUT], mtf.Normal(0.5))], [*y.shape])
    return mtf.Model(mtf.reduce_mean(mtf.square(made - y)), mtf.Adam(0.05, ema=ema))


ROWS = {"x": X[1][0, :4].astype(np.float32), "y": X[1][1, :4, :4].astype(np.float32)}


def test_evaluated() -> None:
    last, mean = RECIPES["evaluated"](regression(ema=0.9), "x:2", "batch:x", [ROWS] * 20, [ROWS], 20)
    assert last["loss"] < mean["loss"]  # The mean lags behind.


def test_adapters(tmp_path: Path) -> None:
    """A base model's checkpoint into one with adapters: it begins as the base, and only these are trained."""
    base = mtf.Trainer(regression(), "x:2", "batch:x")
    base.fit([ROWS] * 5, 5, tmp_path)
    tuned, loaded = RECIPES["fine_tuned"](regression("head"), tmp_path, "x:2", "d_model:x")
    assert set(loaded.new) == {"head/lora_down", "head/lora_up"} and loaded.variables == ("w",)
    assert tuned.evaluate([ROWS])["loss"] == pytest.approx(base.evaluate([ROWS])["loss"], rel=1e-5)
    before = tuned.engine.read("w")
    losses = [tuned.step(ROWS)["loss"] for _ in range(10)]
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_array_equal(tuned.engine.read("w"), before)
    with pytest.raises(mtf.UserError, match="no weights for 'adapter/lora_down'"):
        mtf.Trainer(regression("adapter"), "x:2").load(tmp_path, new="head")


def test_continued(tmp_path: Path) -> None:
    """A tiny Llama that transformers has computed the loss of."""
    case = json.loads((Path(__file__).parents[1] / "data" / "huggingface_losses.json").read_text())["models"][
        "llama"
    ]
    weights = {
        n: np.random.default_rng(zlib.crc32(n.encode())).normal(scale=0.5, size=shape).astype(np.float32)
        for n, shape in case["weights"].items()
    }
    array_files.write_pieces(tmp_path / "model.safetensors", whole(weights))
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    rng = np.random.default_rng(0)
    batch = {
        n: rng.integers(0, below, shape).astype(np.int32) for n, (shape, below) in case["inputs"].items()
    }
    trainer = RECIPES["continued"](tmp_path, "x:2", "heads:x;d_ff:x", batch=2, length=12)
    assert trainer.evaluate([batch])["loss"] == pytest.approx(case["loss"], rel=1e-5)


def test_until_no_better(tmp_path: Path) -> None:
    """It stops where the held-out loss turns, and keeps the weights of before."""
    trainer, path = mtf.Trainer(regression(), "x:2", "batch:x"), tmp_path / "best.npz"
    other = {n: -x if n == "y" else x for n, x in ROWS.items()}
    steps = itertools.chain([ROWS] * 6, itertools.repeat(other))
    best = RECIPES["until_no_better"](trainer, steps, [ROWS], path, every=2, patience=2)
    again = mtf.Trainer(regression(), "x:2")
    again.load(path)
    assert again.evaluate([ROWS])["loss"] == pytest.approx(best, rel=1e-5)
    assert trainer.evaluate([ROWS])["loss"] > best
