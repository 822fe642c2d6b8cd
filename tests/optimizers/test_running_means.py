"""Running means of the variables (EMA): their numbers, where they lie, what they cost, who reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.lower import Options

B, D, F = mtf.Dim("batch", 8), mtf.Dim("d", 4), mtf.Dim("f", 8)
RNG = np.random.default_rng(0)
BATCHES = [{"x": RNG.normal(size=(8, 4)).astype(np.float32)} for _ in range(4)]


def model(ema: float = 0.9, dtype: str = "float32", **more: Any) -> mtf.Model:
    g = mtf.Graph()
    x = g.input("x", [B, D], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        up, down = (g.variable(n, dims, mtf.Normal(0.5), dtype, "float32") for n, dims in WEIGHTS)
        return h + mtf.einsum([mtf.tanh(mtf.einsum([h, up], [B, F])), down], [B, D])

    h = mtf.scan(layer, x, mtf.Dim("layers", 2))
    scale = g.variable("scale", [D], mtf.ONES, dtype, "float32")
    return mtf.Model(mtf.reduce_mean(mtf.square(h * scale)), mtf.Adam(0.05, ema=ema, **more))


WEIGHTS = (("up", [D, F]), ("down", [F, D]))
NAMES = ("up", "down", "scale")
LAYOUTS = [("", 0), ("batch:x;f:y", 0), ("batch:x", 1), ("batch:x;f:y", 3)]


def trainer(layout: str, stage: int, parts: int = 1, **more: Any) -> mtf.Trainer:
    options = Options(dict.fromkeys(NAMES, stage), microbatches=parts)
    return mtf.Trainer(model(**more), "x:2;y:2", layout, options, engine="lockstep")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("layout", "stage"), LAYOUTS)
def test_they_are_means_of_the_variables(layout: str, stage: int, parts: int) -> None:
    """After every step; evaluation and files have them, under every storage."""
    run, want = trainer(layout, stage, parts), {}
    for n, batch in enumerate(BATCHES):
        run.step(batch)
        for name in NAMES:
            now = run.engine.read(name).astype(np.float64)
            want[name] = 0.9 * want[name] + 0.1 * now if n else now
    for name in NAMES:
        np.testing.assert_allclose(run.engine.read(f"{name}/ema"), want[name], rtol=1e-5, atol=1e-6)
    other = mtf.Trainer(model(0.0), "one:1", "", engine="lockstep")
    other.load(want)
    found = run.evaluate(BATCHES[:1], ema=True)
    assert found["loss"] == pytest.approx(other.evaluate(BATCHES[:1])["loss"], rel=1e-5)
    assert abs(found["loss"] / run.evaluate(BATCHES[:1])["loss"] - 1) > 1e-3


def test_saved_under_the_variables_names(tmp_path: Path) -> None:
    run = trainer("batch:x", 1)
    for batch in BATCHES:
        run.step(batch)
    run.save_weights(tmp_path / "means.safetensors", ema=True)
    other = mtf.Trainer(model(0.0), "one:1", "", engine="lockstep")
    assert set(other.load(tmp_path / "means.safetensors").variables) == set(NAMES)
    for name in NAMES:
        np.testing.assert_array_equal(other.engine.read(name), run.engine.read(f"{name}/ema"))


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    whole, half, rest = (trainer(*at) for at in (("batch:x", 1), ("", 0), ("batch:x;f:y", 3)))
    whole.fit(BATCHES, 4)
    half.fit(BATCHES, 2, tmp_path)
    rest.fit(BATCHES, 4, tmp_path)
    np.testing.assert_allclose(rest.engine.read("up/ema"), whole.engine.read("up/ema"), rtol=1e-5)


def test_variables_of_16_bits_have_means_of_32() -> None:
    run = trainer("batch:x", 0, dtype="bfloat16", ema=0.5)
    for batch in BATCHES[:2]:
        run.step(batch)
    mean = run.engine.read("up/ema")
    assert str(mean.dtype) == "float32" and str(run.engine.read("up").dtype) == "bfloat16"
    assert np.isfinite(run.evaluate(BATCHES[:1], ema=True)["loss"])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_step_that_is_left_out_leaves_them() -> None:
    """Also the first one, after which the next is the first."""
    run, nothing = trainer("", 0, loss_scale=mtf.LossScale(8.0)), {"x": np.full((8, 4), np.inf, np.float32)}
    run.step(nothing)
    assert not run.engine.read("up/ema").any()
    run.step(BATCHES[0])
    first = run.engine.read("up/ema")
    np.testing.assert_array_equal(first, run.engine.read("up"))
    run.step(nothing)
    np.testing.assert_array_equal(run.engine.read("up/ema"), first)


def test_memory_is_priced() -> None:
    """Four bytes a parameter, split as the optimizer's state is."""
    count = model().parameters

    def held(ema: float, stage: int) -> float:
        options = Options(dict.fromkeys(NAMES, stage))
        run = mtf.Trainer(model(ema), "x:4", "batch:x", options, engine="lockstep")
        return run.engine.variable_bytes

    assert held(0.9, 0) - held(0.0, 0) == 4 * count
    assert held(0.9, 1) - held(0.0, 1) == count


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mtf.Adam(0.1, ema=1.0), "ema must be at least 0 and less than 1"),
        (lambda: trainer("", 0, ema=0.0).evaluate(BATCHES, ema=True), "evaluate: the optimizer has no"),
        (
            lambda: trainer("", 0).evaluate(BATCHES, ema=True),
            "there are no running means before the first step; train",
        ),
        (
            lambda: trainer("", 0).save_weights("w.npz", ema=True),
            "there are no running means before the first step; train",
        ),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        call()
