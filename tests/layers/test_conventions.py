"""What layers of other libraries have: epsilons, biases, exact gelu; answers to other libraries' habits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import special

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.engines.lockstep import LockstepEngine

B, L, D = mtf.Dim("batch", 2), mtf.Dim("length", 4), mtf.Dim("d_model", 8)
X = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)


def run(make: Any, layout: str = "batch:x", **arrays: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """What a layer makes of X, with variables set, and all its variables."""
    g = mtf.Graph()
    y = make(g.input("x", [B, L, D], "float32"))
    engine = LockstepEngine(mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout(layout), {"y": y}))
    engine.initialize()
    for name, value in arrays.items():
        engine.write(name.replace("__", "/"), value)
    return engine.step({"x": X})["y"], {n: engine.read(n) for n in g.variables}


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_epsilon_of_norms(epsilon: float) -> None:
    rms = np.sqrt((X**2).mean(-1, keepdims=True) + epsilon)
    spread = np.sqrt(X.var(-1, keepdims=True) + epsilon)
    for layout in ("batch:x", "d_model:x"):
        found, _ = run(layers.RMSNorm(epsilon=epsilon), layout)
        np.testing.assert_allclose(found, X / rms, rtol=1e-5, atol=1e-6)
        found, _ = run(layers.ScaleNorm(epsilon=epsilon), layout)
        np.testing.assert_allclose(found, X / rms, rtol=1e-5, atol=1e-6)
        found, _ = run(layers.LayerNorm(epsilon=epsilon), layout)
        np.testing.assert_allclose(found, (X - X.mean(-1, keepdims=True)) / spread, rtol=1e-4, atol=1e-5)


def test_exact_gelu() -> None:
    want = X * special.ndtr(X.astype(np.float64))
    np.testing.assert_allclose(run(lambda x: mtf.gelu(x, exact=True))[0], want, rtol=1e-5, atol=1e-6)
    found, _ = run(layers.FeedForward(mtf.Dim("d_ff", 4), activation="gelu_exact"))
    assert np.isfinite(found).all()
    assert np.abs(run(mtf.gelu)[0] - want).max() > 1e-5


@pytest.mark.parametrize("form", ["fused", "plain"])
def test_biases_of_attention(form: str) -> None:
    heads, kv = mtf.Dim("heads", 2), mtf.Dim("d_kv", 3)
    rng = np.random.default_rng(1)
    given = {f"attention__{n}_bias": rng.normal(size=(2, 3)).astype(np.float32) for n in "qkv"}
    given["attention__o_bias"] = rng.normal(size=8).astype(np.float32)
    layer = layers.Attention(heads, kv, biases="all", attention=form)
    found, v = run(layer, "heads:x", **given)
    q, k, u = (
        np.einsum("bld,dhk->blhk", X, v[f"attention/{n}"]) + given[f"attention__{n}_bias"] for n in "qkv"
    )
    weights = special.softmax(np.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(3), -1)
    want = np.einsum("bhlm,bmhk,hkd->bld", weights, u, v["attention/o"]) + given["attention__o_bias"]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    _, only = run(layers.Attention(heads, kv, biases="qkv"))
    assert "attention/q_bias" in only and "attention/o_bias" not in only
    assert not any("bias" in n for n in run(layers.Attention(heads, kv))[1])


def test_biases_where_there_are_none_are_refused() -> None:
    with pytest.raises(mtf.UserError, match="this layer supports no biases; use biases='none'"):
        layers.BilinearAttention(mtf.Dim("heads", 2), mtf.Dim("d_kv", 8), biases="qkv")
    with pytest.raises(mtf.UserError, match="biases='q' is unknown"):
        layers.Attention(mtf.Dim("heads", 2), mtf.Dim("d_kv", 8), biases="q")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda x: x[0], r"mtf\.slice_dim\(x, 'batch', begin, size\)"),
        (lambda x: x @ x, r"mtf\.einsum\(\[x, w\], output\)"),
        (lambda x: np.ones(3) @ x, r"mtf\.einsum"),
        (lambda x: x.sum(), r"'sum'; write mtf\.reduce_sum\(x, dims\)"),
        (lambda x: x.mean(-1), r"mtf\.reduce_mean"),
        (lambda x: x.T, r"mtf\.transpose"),
        (lambda x: x.reshape(3, 4), r"mtf\.reshape\(x, dims\)"),
        (lambda x: x.to("cuda"), r"x\.cast\(dtype\)"),
        (list, r"mtf\.unstack"),
    ],
)
def test_other_habits_are_answered_by_what_to_write(made: Any, said: str) -> None:
    x = mtf.Graph().input("x", [B, D], "float32")
    with pytest.raises(mtf.UserError, match=said):
        made(x)


def test_what_no_library_has_is_no_attribute() -> None:
    x = mtf.Graph().input("x", [B, D], "float32")
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'summ'"):
        _ = x.summ
    assert not hasattr(x, "sum") and not hasattr(x, "item")
