"""Latent attention against its equations, its gradients against JAX's, and attention in chunks."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.layers.attention import FORMS
from tests.layers.helper import Run, check_layouts, run
from tests.marks import by_day

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
DIMS = [mtf.Dim(n, int(s)) for n, s in (part.split(":") for part in X[0].split())]
H, K, V, C = mtf.Dim("heads", 4), mtf.Dim("d_kv", 4), mtf.Dim("d_v", 6), mtf.Dim("kv_rank", 4)
LATENT = layers.LatentAttention(H, K, causal=True, kv_rank=C, d_rotary=2, d_v=V)
LOW = replace(LATENT, q_rank=mtf.Dim("q_rank", 6), window=3)
LAYOUTS = [
    ("x:2;y:2", "batch:x;heads:y"),
    ("x:2;y:2", "length:x;memory_length:y"),
    ("x:2;y:2", "kv_rank:x;d_v:y"),
    ("x:2;y:2", "d_model:x;d_kv:y"),
]


def rotated(x: Any) -> Any:
    """x [batch, length, ..., d] as complex numbers times e^(i position angle)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    angle = angle.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    a, b = x[..., :half], x[..., half:]
    c, s = np.cos(angle), np.sin(angle)
    return jnp.concatenate([a * c - b * s, a * s + b * c], -1)


def rms(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def latent(w: dict[str, Any], x: Any, window: int = 0) -> Any:
    """DeepSeek-V2, equations 9 to 19."""
    w = {n.removeprefix("attention/"): v for n, v in w.items()}
    low = rms(x @ w["q_down"], w["q_norm/scale"]) if "q_down" in w else x
    q = jnp.einsum("bld,dhk->blhk", low, w["q_up"] if "q_down" in w else w["q"])
    q = jnp.concatenate([q[..., : K.size], rotated(q[..., K.size :])], -1)
    c = rms(x @ w["kv_down"], w["kv_norm/scale"])
    r = rotated(x @ w["k_rotary"])
    k = jnp.einsum("blc,chk->blhk", c, w["k_up"])
    k = jnp.concatenate([k, jnp.broadcast_to(r[:, :, None], (*k.shape[:3], r.shape[-1]))], -1)
    v = jnp.einsum("blc,chv->blhv", c, w["v_up"])
    logits = jnp.einsum("blhk,bmhk->bhlm", q, k) / np.sqrt(q.shape[-1])
    apart = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])
    seen = (apart >= 0) & (apart < (window or x.shape[1]))
    p = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), -1)
    return jnp.einsum("bhlm,bmhv,hvd->bld", p, v, w["o"])


def check_gradients(made: Run, formula: Any) -> None:
    """One step of plain descent (see `helper.run`) is JAX's."""
    weights = np.random.default_rng(zlib.crc32(str(mtf.Shape(DIMS)).encode())).normal(size=(4, 8, 8))
    w = {n: v for n, v in made.variables.items() if n != "step"}
    slopes = jax.jit(jax.grad(lambda w: (formula(w, X[1]) * weights).sum()))(w)
    for name, slope in slopes.items():
        np.testing.assert_allclose(
            made.after[name], w[name] - 0.01 * slope, rtol=1e-3, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    ("kind", "form"),
    by_day(((LATENT, FORMS[0]), (LATENT, FORMS[1]), (LOW, FORMS[1]), (LOW, FORMS[0])), every=4),
)
def test_latent(kind: layers.LatentAttention, form: str) -> None:
    chosen = replace(kind, attention=form)
    dense = check_layouts(lambda g, x: chosen(x), {"x": X}, LAYOUTS)
    np.testing.assert_allclose(dense.out, latent(dense.variables, X[1], kind.window), rtol=1e-4, atol=1e-5)
    if form == "fused":
        check_gradients(dense, lambda w, x: latent(w, x, kind.window))


def test_parameters_of_deepseek_v2_lite() -> None:
    """Of one layer's attention: q, kv_a with its norm, kv_b and o of its published configuration."""
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("batch", 1), mtf.Dim("length", 8), mtf.Dim("d_model", 2048)], "float32")
    heads, d_kv, d_v = mtf.Dim("heads", 16), mtf.Dim("d_kv", 128), mtf.Dim("d_v", 128)
    layer = layers.LatentAttention(
        heads, d_kv, causal=True, kv_rank=mtf.Dim("kv_rank", 512), d_rotary=64, d_v=d_v
    )
    model = mtf.Model(mtf.reduce_mean(layer(x)))
    assert model.parameters == 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048


# -- chunks --------------------------------------------------------------------------------------------------

CHUNKED = layers.ChunkedAttention(H, K, causal=True, rotary=layers.Rotary(100.0), chunk=4)
CHUNK_LAYOUTS = [
    ("x:2;y:2", "batch:x;heads:y"),
    ("x:2", "blocks:x;length:x"),
    ("x:2;y:2", "length:x;d_model:y"),
]


def own_chunk(g: mtf.Graph) -> mtf.Tensor:
    """Where a query and a key are of one chunk."""
    query, key = (mtf.floordiv(mtf.mtf_range(g, mtf.Dim(n, 8)), 4) for n in ("length", "memory_length"))
    return query.equal(key)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("causal", "kv_heads"), [(True, 0), (False, 2)])
def test_chunks_give_what_a_mask_gives(form: str, causal: bool, kv_heads: int) -> None:
    kind = replace(CHUNKED, attention=form, causal=causal, kv_heads=kv_heads)
    whole = layers.Attention(H, K, causal=causal, kv_heads=kv_heads, rotary=layers.Rotary(100.0))

    def masked(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return whole(x, mask=own_chunk(g))

    dense = check_layouts(lambda g, x: kind(x), {"x": X}, CHUNK_LAYOUTS)
    want = run(masked, {"x": X})
    np.testing.assert_allclose(dense.out, want.out, rtol=1e-4, atol=1e-5)
    for name, value in want.after.items():
        np.testing.assert_allclose(dense.after[name], value, rtol=1e-3, atol=1e-5)


def test_chunks_with_padding_and_packed_texts() -> None:
    ids = np.where(np.arange(8) % 4 == 3, 0, 1) * np.ones((4, 1))
    texts = np.repeat([[0, 0, 0, 0, 0, 1, 1, 1]], 4, 0)

    def built(kind: Any) -> Any:
        def build(g: mtf.Graph, x: mtf.Tensor, ids: mtf.Tensor, texts: mtf.Tensor) -> mtf.Tensor:
            text = texts.cast("int32")
            mask = layers.padding_mask(ids.cast("int32"))
            if kind is not CHUNKED:
                chunk = [
                    mtf.floordiv(mtf.mtf_range(g, mtf.Dim(n, 8)), 4) for n in ("length", "memory_length")
                ]
                mask = mask & chunk[0].equal(chunk[1])
            return kind(x, mask=mask, segments=(text, mtf.rename(text, length="memory_length")))

        return build

    inputs = {"x": X, "ids": ("batch:4 length:8", ids), "texts": ("batch:4 length:8", texts)}
    dense = check_layouts(built(CHUNKED), inputs, CHUNK_LAYOUTS[:2])
    whole = run(built(layers.Attention(H, K, causal=True, rotary=layers.Rotary(100.0))), inputs)
    np.testing.assert_allclose(dense.out, whole.out, rtol=1e-4, atol=1e-5)


def work(kind: layers.Attention) -> float:
    """FLOPs of attention itself in a step on texts of 64."""
    g = mtf.Graph()
    x = g.input("x", [mtf.Dim("batch", 2), mtf.Dim("length", 64), mtf.Dim("d_model", 8)], "float32")
    kind(x)
    nodes = [node for node, _ in g.walk() if node.op.kind == "attention"]
    return sum(node.op.flops(*(g.tensor(i).type for i in node.inputs)) for node in nodes)


def test_what_is_hidden_is_not_priced() -> None:
    """Pairs of a query and a key: all before, those of a window, those of a chunk."""
    causal = layers.Attention(H, K, causal=True)
    per_pair = 2 * H.size * 2 * 2 * K.size
    assert work(causal) == per_pair * 64 * 65 / 2
    assert work(replace(causal, window=8)) == per_pair * (8 * 9 / 2 + 56 * 8)
    assert work(replace(CHUNKED, chunk=16)) == per_pair * 4 * 16 * 17 / 2
    assert work(replace(CHUNKED, chunk=16, window=8)) == per_pair * 4 * (8 * 9 / 2 + 8 * 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: replace(LATENT, kv_heads=2),
            "LatentAttention: kv_heads, shared_kv, rotary and memory are not",
        ),
        (lambda: replace(LATENT, d_rotary=3), "d_rotary must be even and positive, found 3"),
        (lambda: replace(LATENT, d_v=mtf.Dim("d_kv", 6)), "LatentAttention: d_v and d_kv are both named"),
        (lambda: replace(LATENT, biases="qkv"), "this layer supports no biases; use biases='none'"),
        (
            lambda: run(lambda g, x: LATENT(x, x), {"x": X}),
            "LatentAttention: kv_heads, shared_kv, rotary and memory are not supported; set",
        ),
        (lambda: replace(CHUNKED, chunk=0), "chunk must be at least 1 position, found 0"),
        (
            lambda: run(lambda g, x: replace(CHUNKED, chunk=3)(x), {"x": X}),
            "length=8 must be a multiple of chunk=3",
        ),
        (
            lambda: run(lambda g, x: CHUNKED(x, x), {"x": X}),
            "ChunkedAttention: memory is not supported; use",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()
