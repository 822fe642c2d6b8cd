"""Dense, feed-forward, norms and embeddings against NumPy and under layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from tests.layers.helper import check_layouts, run

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
LAYOUTS = [
    ("x:2;y:2", "batch:x+y"),
    ("x:2;y:2", "batch:x;d_ff:y"),
    ("x:2;y:2", "d_model:x;d_ff:y"),
    ("x:2;y:2", "length:y;d_model:x"),
]
F, D = mtf.Dim("d_ff", 16), mtf.Dim("d_model", 8)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def test_dense() -> None:
    outputs = (mtf.Dim("d_ff", 16), mtf.Dim("part", 2))
    layer = layers.Dense(outputs, ("length", "d_model"), bias=True, activation="tanh")
    dense = check_layouts(lambda g, x: layer(x), {"x": X}, LAYOUTS)
    want = np.tanh(np.einsum("bld,ldfp->bfp", X[1], dense.variables["dense/weight"]))
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)
    assert dense.variables["dense/bias"].shape == (16, 2)


@pytest.mark.parametrize("gated", [True, False])
def test_feed_forward(gated: bool) -> None:
    layer = layers.FeedForward(F, "silu", gated, bias=True)
    dense = check_layouts(lambda g, x: layer(x), {"x": X}, LAYOUTS)
    w = {n.split("/")[-1]: v for n, v in dense.variables.items()}
    hidden = silu(X[1] @ w["wi"]) * (X[1] @ w["wg"] if gated else 1.0)
    np.testing.assert_allclose(dense.out, hidden @ w["wo"], rtol=1e-4, atol=1e-5)
    assert ("wg" in w) == gated


def test_norms() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return layers.LayerNorm(bias=True)(x) + layers.RMSNorm(name="rms")(x)

    dense = check_layouts(build, {"x": X}, [("x:2;y:2", "batch:x;d_model:y"), LAYOUTS[0], LAYOUTS[3]])
    centred = X[1] - X[1].mean(-1, keepdims=True)
    want = centred / centred.std(-1, keepdims=True)
    want = want + X[1] / np.sqrt((X[1] ** 2).mean(-1, keepdims=True))
    np.testing.assert_allclose(dense.out, want, rtol=1e-3, atol=1e-4)
    assert sorted(dense.variables) == ["norm/bias", "norm/scale", "rms/scale", "step"]


IDS = ("batch:4 length:8", RNG.integers(0, 16, (4, 8)).astype(float))
SPLIT_VOCAB = [
    ("x:2;y:2", "vocab:x;batch:y"),
    ("x:2;y:2", "vocab:x+y"),
    ("x:2;y:2", "d_model:x;length:y"),
    ("x:2;y:2", "vocab:y;d_model:x"),
]


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings(tied: bool) -> None:
    embedding = layers.Embedding(mtf.Dim("vocab", 16), D, stddev=0.5)

    def build(g: mtf.Graph, ids: mtf.Tensor) -> mtf.Tensor:
        table = embedding.table(g)
        x = embedding(table, ids.cast("int32"))
        x = layers.LearnedPositions(12)(x)
        return embedding.logits(mtf.tanh(x), table if tied else None)

    dense = check_layouts(build, {"ids": IDS}, SPLIT_VOCAB)
    w = dense.variables
    x = np.tanh(w["embedding/tokens"][IDS[1].astype(int)] + w["embedding/positions"][:8])
    out = w["embedding/tokens"].T if tied else w["output/projection"]
    np.testing.assert_allclose(dense.out, x @ out, rtol=1e-4, atol=1e-5)


def test_activations_run_in_the_dtype_of_the_input() -> None:
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("batch", 4), D], "bfloat16")
    y = layers.FeedForward(F, gated=True)(layers.LayerNorm()(x))
    assert y.dtype == "bfloat16"
    assert {v.dtype for v in g.variables.values()} == {"float32"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.FeedForward(F, "rellu"), "activation 'rellu'.*relu"),
        (lambda: layers.FeedForward(F, dropout=-0.1), "dropout must be at least 0 and less than 1, found"),
        (
            lambda: layers.Dense((), ("d_model",)),
            "Dense: `outputs` and `reduced` must each name at least one",
        ),
        (
            lambda: run(lambda g, x: layers.LearnedPositions(4)(x), {"x": X}),
            "LearnedPositions: count=4 is less than length=",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(smoothing: float, z_loss: float) -> None:
    vocab = mtf.Dim("vocab", 16)
    logits = ("batch:4 length:8 vocab:16", RNG.normal(size=(4, 8, 16)))
    layer = layers.CrossEntropy(vocab, smoothing, z_loss)

    def build(g: mtf.Graph, logits: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
        return layer(logits * g.variable("scale", [vocab], mtf.ONES), ids.cast("int32"))

    layouts = [("x:2;y:2", "vocab:x+y"), ("x:2;y:2", "batch:x;vocab:y")]
    dense = check_layouts(build, {"logits": logits, "ids": IDS}, layouts)
    lse = np.log(np.exp(logits[1]).sum(-1))
    log_p = logits[1] - lse[..., None]
    q = (1 - smoothing) * np.eye(16)[IDS[1].astype(int)] + smoothing / 16
    np.testing.assert_allclose(dense.out, -(q * log_p).sum(-1) + z_loss * lse**2, rtol=1e-4, atol=1e-5)


def test_cross_entropy_with_distributions() -> None:
    """A one-hot distribution gives what its id gives; others the mean over what they draw."""
    vocab = mtf.Dim("vocab", 16)
    x = ("batch:4 vocab:16", RNG.normal(size=(4, 16)))
    q = RNG.dirichlet(np.ones(16), 4)
    q[0] = np.eye(16)[3]
    layer = layers.CrossEntropy(vocab, 0.1, 0.01)

    def build(g: mtf.Graph, x: mtf.Tensor, q: mtf.Tensor) -> mtf.Tensor:
        return layer(x * g.variable("scale", [vocab], mtf.ONES), q)

    layouts = [("x:2;y:2", "vocab:x+y"), ("x:2;y:2", "batch:x;vocab:y")]
    dense = check_layouts(build, {"x": x, "q": ("batch:4 vocab:16", q)}, layouts)
    lse = np.log(np.exp(x[1]).sum(-1))
    target = 0.9 * q + 0.1 / 16
    want = (target * (lse[:, None] - x[1])).sum(-1) + 0.01 * lse**2
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)
    ids = run(lambda g, x, i: layer(x, i.cast("int32")), {"x": x, "i": ("batch:4", np.full(4, 3.0))})
    np.testing.assert_allclose(ids.out[0], dense.out[0], rtol=1e-5)


def test_sigmoid_cross_entropy() -> None:
    t = ("batch:4 length:8 d_model:8", RNG.uniform(size=(4, 8, 8)))

    def build(g: mtf.Graph, x: mtf.Tensor, t: mtf.Tensor) -> mtf.Tensor:
        return layers.sigmoid_cross_entropy(x * g.variable("scale", [D], mtf.ONES), t)

    layouts = [("x:2;y:2", "batch:x;d_model:y"), ("x:2;y:2", "length:y;d_model:x")]
    dense = check_layouts(build, {"x": X, "t": t}, layouts)
    p = 1 / (1 + np.exp(-X[1]))
    want = -t[1] * np.log(p) - (1 - t[1]) * np.log(1 - p)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)
    far = {"x": ("a:2", np.array([90.0, -90.0]))}
    large = run(lambda g, x: layers.sigmoid_cross_entropy(x, x * 0.0), far)
    np.testing.assert_allclose(large.out, [90.0, 0.0], atol=1e-6)


def test_losses_refuse_other_dimensions() -> None:
    q = ("length:8 d_model:8", RNG.uniform(size=(8, 8)))
    with pytest.raises(mtf.UserError, match="CrossEntropy: targets must be class ids without the dimension"):
        run(lambda g, x, q: layers.CrossEntropy(D)(x, q), {"x": X, "q": q})
    with pytest.raises(mtf.UserError, match="sigmoid_cross_entropy: logits and targets must have the same"):
        run(lambda g, x, q: layers.sigmoid_cross_entropy(x, q), {"x": X, "q": q})


def test_a_bad_share_is_refused() -> None:
    with pytest.raises(mtf.UserError, match="CrossEntropy: label_smoothing must be at least 0 and less than"):
        layers.CrossEntropy(mtf.Dim("vocab", 16), 1.0)
