"""Batch and scale normalisation, ReZero, sinusoids and noise against NumPy and under layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.ir.program import Collective
from tests.layers.helper import check_layouts, run

RNG = np.random.default_rng(0)
IMAGES = ("batch:4 height:4 width:4 channels:4", RNG.normal(1.0, 2.0, (4, 4, 4, 4)))
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
DIMS = ("batch", "height", "width")
SPLIT_IMAGES = [
    ("x:2;y:2", "batch:x;height:y"),
    ("x:2;y:2", "height:x;width:y"),
    ("x:2;y:2", "batch:x+y"),
    ("x:2;y:2", "batch:x;channels:y"),
]
LAYOUTS = [("x:2;y:2", "batch:x;d_model:y"), ("x:2;y:2", "length:y;batch:x"), ("x:4", "d_model:x")]


def test_batch_norm_uses_the_whole_batch_wherever_it_lies() -> None:
    layer = layers.BatchNorm(DIMS, momentum=0.75)
    dense = check_layouts(lambda g, x: layer(x), {"x": IMAGES}, SPLIT_IMAGES)
    mean, variance = IMAGES[1].mean((0, 1, 2)), IMAGES[1].var((0, 1, 2))
    want = (IMAGES[1] - mean) / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dense.after["norm/moving_mean"], 0.25 * mean, rtol=1e-4)
    np.testing.assert_allclose(dense.after["norm/moving_variance"], 0.75 + 0.25 * variance, rtol=1e-4)


def test_batch_norm_sends_statistics_only() -> None:
    made = run(lambda g, x: layers.BatchNorm(DIMS)(x), {"x": IMAGES}, "x:4", "batch:x")
    sent = [i for i, _ in made.program.walk() if isinstance(i, Collective)]
    assert {type(i).__name__ for i in sent} == {"AllReduce"}
    assert all(made.program.values[i.inputs[0]].shape.size <= 8 for i in sent)


def test_batch_norm_in_inference_and_its_gradient() -> None:
    """It uses the averages (at first mean 0 and variance 1), and leaves them as they are."""
    layer = layers.BatchNorm(DIMS, training=False, initial_scale=0.5)
    got = run(lambda g, x: layer(x), {"x": IMAGES}, *SPLIT_IMAGES[0])
    np.testing.assert_allclose(got.out, 0.5 * IMAGES[1] / np.sqrt(1 + 1e-5), rtol=1e-5)
    for name in ("norm/moving_mean", "norm/moving_variance"):
        np.testing.assert_array_equal(got.after[name], got.variables[name])


def test_batch_norm_in_a_stack_of_layers() -> None:
    """Every layer has averages of its own, also where the stack is written once."""

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        return mtf.tanh(layers.BatchNorm(DIMS)(x))

    dense = check_layouts(
        lambda g, x: mtf.scan(layer, x, mtf.Dim("layers", 2)), {"x": IMAGES}, SPLIT_IMAGES[:2]
    )
    y, means = IMAGES[1], []
    for _ in range(2):
        means.append(y.mean((0, 1, 2)))
        y = np.tanh((y - y.mean((0, 1, 2))) / np.sqrt(y.var((0, 1, 2)) + 1e-5))
    np.testing.assert_allclose(dense.out, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dense.after["norm/moving_mean"], 0.1 * np.array(means), rtol=1e-3, atol=1e-6)


def test_batch_norm_refuses_microbatches() -> None:
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("batch", 4), mtf.Dim("channels", 2)], "float32")
    model = mtf.Model(mtf.reduce_sum(layers.BatchNorm(("batch",))(x)))
    with pytest.raises(mtf.UserError, match="needs several sums over the whole batch, one after another"):
        model.training_step(2)


def test_scale_norm_and_rezero() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return x + layers.ReZero(0.5)(mtf.tanh(layers.ScaleNorm()(x)))

    dense = check_layouts(build, {"x": X}, LAYOUTS)
    normal = X[1] * np.sqrt(8) / np.linalg.norm(X[1], axis=-1, keepdims=True)
    np.testing.assert_allclose(dense.out, X[1] + 0.5 * np.tanh(normal), rtol=1e-4, atol=1e-5)
    assert dense.variables["norm/scale"].shape == dense.variables["rezero/scale"].shape == ()


def test_a_block_begins_as_the_identity() -> None:
    got = run(lambda g, x: x + layers.ReZero()(x * 7.0), {"x": X})
    np.testing.assert_array_equal(got.out, X[1].astype(np.float32))


def test_sinusoids() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return layers.Sinusoids(100.0)(x) * g.variable("one", [], mtf.ONES)

    dense = check_layouts(build, {"x": X}, LAYOUTS)
    angle = np.arange(8)[:, None] * 100.0 ** (-np.arange(4) / 3)
    want = X[1] + np.concatenate([np.sin(angle), np.cos(angle)], -1)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("start", "rate"), [(0, 0.8), (4, 0.8)])
def test_annealed_dropout(start: int, rate: float) -> None:
    """At step 0 the rate is the first one: kept elements are scaled so that the mean stays."""
    layer = layers.AnnealedDropout(rate, start, 8)
    ones = ("batch:4 d_model:512", np.ones((4, 512)))

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return layer(x * g.variable("one", [], mtf.ONES))

    dense = check_layouts(build, {"x": ones}, LAYOUTS[:1] + LAYOUTS[2:])
    kept = dense.out[dense.out != 0]
    np.testing.assert_allclose(kept, 5.0, rtol=1e-5)
    assert 0.15 < kept.size / dense.out.size < 0.25


def test_annealed_dropout_ends() -> None:
    """The rate after half of the steps is half the first, at the end nothing is dropped."""
    from mesh_tf_core.engines.lockstep import LockstepEngine

    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("batch", 4), mtf.Dim("d_model", 512)], "float32")
    y = layers.AnnealedDropout(0.8, 0, 4)(x)
    model = mtf.Model(mtf.reduce_mean(y * g.variable("w", [], mtf.ONES)))
    step = model.training_step()
    engine = LockstepEngine(mtf.lower(step.graph, mtf.Mesh("one:1"), mtf.Layout(""), {"y": y}))
    engine.initialize()
    shares = [float((engine.step({"x": np.ones((4, 512), np.float32)})["y"] != 0).mean()) for _ in range(6)]
    np.testing.assert_allclose(shares, [0.2, 0.4, 0.6, 0.8, 1.0, 1.0], atol=0.05)


def test_jitter() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return layers.Jitter(0.1)(x * g.variable("one", [], mtf.ONES))

    dense = check_layouts(build, {"x": X}, LAYOUTS)
    factor = dense.out / X[1]
    assert factor.min() >= 0.9 - 1e-6
    assert factor.max() <= 1.1 + 1e-6
    assert factor.std() > 0.04


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.BatchNorm(()), "BatchNorm: `dims` must name at least one dimension, usually the"),
        (
            lambda: layers.BatchNorm(("batch",), momentum=1.5),
            "BatchNorm: momentum must be from 0 to 1, found",
        ),
        (lambda: run(lambda g, x: layers.BatchNorm(("time",))(x), {"x": X}), "has no dimension 'time'"),
        (lambda: layers.AnnealedDropout(1.0, 0, 1), "dropout must be at least 0 and less than 1, found"),
        (
            lambda: layers.AnnealedDropout(0.5, 3, 3),
            "AnnealedDropout: start must be at least 0 and less than end,",
        ),
        (lambda: layers.Jitter(1.0), "Jitter: epsilon must be at least 0 and less than 1, found"),
        (
            lambda: run(lambda g, x: layers.Sinusoids()(x), {"x": ("length:4 d_model:5", np.zeros((4, 5)))}),
            "must be even and at least 4",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()
