"""Attention against NumPy and under layouts; banded attention against the full one with a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.layers.attention import FORMS
from tests.layers.helper import check_layouts, run

H, K = mtf.Dim("heads", 4), mtf.Dim("d_kv", 4)
RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
MEMORY = ("batch:4 memory_length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
LAYOUTS = [
    ("x:2;y:2", "batch:x+y"),
    ("x:2;y:2", "batch:x;heads:y"),
    ("x:2;y:2", "length:x;memory_length:y"),
    ("x:2;y:2", "d_kv:y;d_model:x"),
    ("x:2;y:2", "d_kv:x+y"),
    ("x:2;y:2", "heads:x;length:y"),
]
KINDS: dict[str, layers.Attention] = {
    "plain": layers.Attention(H, K),
    "causal": layers.Attention(H, K, causal=True),
    "window": layers.Attention(H, K, window=3),
    "causal window, rotary": layers.Attention(H, K, causal=True, window=3, rotary=layers.Rotary(100.0)),
    "grouped": layers.Attention(H, K, kv_heads=2, causal=True),
    "one key head": layers.Attention(H, K, kv_heads=1),
    "keys are values": layers.Attention(H, K, kv_heads=2, shared_kv=True, rotary=layers.Rotary(100.0)),
    "an extra logit": layers.Attention(H, K, causal=True, extra_logit=0.5),
}


def rotated(x: Any, base: float) -> Any:
    """x [batch, length, ..., d_kv] as complex numbers times e^(i position angle)."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    z = z * np.exp(1j * angle.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half))
    return np.concatenate([z.real, z.imag], -1)


def reference(kind: layers.Attention, w: dict[str, Any], x: Any, memory: Any, bias: Any = 0.0) -> Any:
    """The published formula, head by head."""
    count = kind.kv_heads or H.size
    q = np.tensordot(x, w["attention/q"], 1).reshape(*x.shape[:2], H.size, K.size)
    names = ("kv", "kv") if kind.shared_kv else ("k", "v")
    k, v = (np.tensordot(memory, w[f"attention/{n}"], 1) for n in names)
    k, v = (t.reshape(*memory.shape[:2], count, K.size) for t in (k, v))
    if kind.rotary:
        q, k = rotated(q, kind.rotary.base), rotated(k, kind.rotary.base)
    k, v = (np.repeat(t, H.size // count, 2) for t in (k, v))
    logits = np.einsum("blhk,bmhk->bhlm", q, k) / 2 + bias
    apart = np.arange(memory.shape[1]) - np.arange(x.shape[1])[:, None]
    seen = np.ones(apart.shape, bool)
    if kind.causal:
        seen &= apart <= 0
    if kind.window:
        seen &= abs(apart) < kind.window
    e = np.where(seen, np.exp(logits), 0)
    total = e.sum(-1, keepdims=True) + (0 if kind.extra_logit is None else np.exp(kind.extra_logit))
    mixed = np.einsum("bhlm,bmhk->blhk", e / total, v)
    return np.tensordot(mixed.reshape(*x.shape[:2], -1), w["attention/o"].reshape(-1, 8), 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(6)
def test_kinds(name: str, form: str) -> None:
    kind = replace(KINDS[name], attention=form)
    layouts = [*LAYOUTS, ("x:2;y:2", "group:x;heads:y")] if name == "grouped" else LAYOUTS
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, layouts)
    want = reference(kind, dense.variables, X[1], X[1])
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_cross_attention(form: str) -> None:
    kind = replace(KINDS["plain"], attention=form)
    inputs = {"x": X, "memory": MEMORY}
    dense = check_layouts(lambda g, x, m: kind(x, m), inputs, LAYOUTS)
    np.testing.assert_allclose(
        dense.out, reference(kind, dense.variables, X[1], MEMORY[1]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_hides_keys(form: str) -> None:
    seen = ("batch:4 memory_length:8", (np.arange(8) < np.array([[3], [8], [1], [5]])).astype(float))

    def build(g: mtf.Graph, x: mtf.Tensor, m: mtf.Tensor, s: mtf.Tensor) -> mtf.Tensor:
        return replace(KINDS["plain"], attention=form)(x, m, mask=s > 0.5)

    got = check_layouts(build, {"x": X, "memory": MEMORY, "seen": seen}, LAYOUTS)
    hidden = np.where(seen[1][..., None] > 0.5, MEMORY[1], 99.0)
    same = run(build, {"x": X, "memory": (MEMORY[0], hidden), "seen": seen})
    np.testing.assert_allclose(same.out, got.out, rtol=1e-5, atol=1e-5)


def t5_bucket(relative: Any, bidirectional: bool, buckets: int, furthest: int) -> Any:
    """The published pseudo-code of T5's relative position buckets."""
    own, out = buckets, 0
    n = -relative
    if bidirectional:
        own //= 2
        out = np.where(n < 0, own, 0)
        n = abs(n)
    else:
        n = np.maximum(n, 0)
    exact = own // 2
    with np.errstate(divide="ignore"):
        far = exact + np.floor(np.log(n / exact) / np.log(furthest / exact) * (own - exact) + 1e-9)
    return out + np.where(n < exact, n, np.minimum(far, own - 1)).astype(int)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("name", ["plain", "grouped", "one key head"])
def test_relative_bias(name: str, bidirectional: bool) -> None:
    kind = KINDS[name]
    positions = layers.RelativeBias(8, 6, bidirectional)

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        return kind(x, bias=positions(kind.relative(x), kind.head_dims))

    dense = check_layouts(build, {"x": X}, LAYOUTS)
    buckets = t5_bucket(np.arange(8) - np.arange(8)[:, None], bidirectional, 8, 6)
    assert len(np.unique(buckets)) > 3
    table = dense.variables["relative_bias/weight"].reshape(8, 4)
    bias = table[buckets].transpose(2, 0, 1)
    want = reference(kind, dense.variables, X[1], X[1], bias)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_long_distances(bidirectional: bool) -> None:
    """T5's own sizes, over all distances that it tells apart and beyond."""
    n = mtf.Dim("n", 401)

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        found = layers.RelativeBias(bidirectional=bidirectional).bucket(mtf.mtf_range(g, n) - 200)
        return found.cast("float32") * g.variable("one", [], mtf.ONES) + x * 0.0

    found = run(build, {"x": ("n:401", np.zeros(401))}).out
    np.testing.assert_array_equal(found, t5_bucket(np.arange(401) - 200, bidirectional, 32, 128))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [2, 4])
def test_blocks_give_what_a_mask_gives(causal: bool, window: int) -> None:
    whole = layers.Attention(H, K, causal=causal, window=window)
    local = layers.LocalAttention(H, K, causal=causal, window=window)
    positions = layers.RelativeBias(8, 6, not causal)

    def build(kind: layers.Attention) -> Any:
        return lambda g, x: kind(x, bias=positions(kind.relative(x), kind.head_dims))

    want = run(build(whole), {"x": X})
    layouts = [
        ("x:2;y:2", "blocks:x;batch:y"),
        ("x:2;y:2", "blocks:x;length:x;heads:y"),
        ("x:2;y:2", "length:x;block_length:y"),
    ]
    got = check_layouts(build(local), {"x": X}, layouts)
    np.testing.assert_allclose(got.out, want.out, rtol=1e-4, atol=1e-5)
    for name, value in got.after.items():
        np.testing.assert_allclose(value, want.after[name], rtol=1e-4, atol=1e-5)


def test_blocks_that_are_split_exchange_their_borders_only() -> None:
    """Split along the length, no device gathers it: forward sends a block of keys and of values."""
    local = layers.LocalAttention(H, K, causal=True, window=2)
    made = run(lambda g, x: local(x), {"x": X}, "x:4", "blocks:x;length:x")
    kinds = {type(i).__name__ for i, _ in made.program.walk() if i.origin.phase == Phase.FORWARD}
    assert "Permute" in kinds
    assert not kinds & {"AllGather", "AllToAll"}


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_key_heads_are_shared_by_groups(kv_heads: int) -> None:
    """With the keys and values repeated for every head, the full attention gives the same."""
    few, full = replace(KINDS["plain"], kv_heads=kv_heads), KINDS["plain"]
    shapes = [run(lambda g, x, k=kind: k(x), {"x": X}).variables["attention/k"].size for kind in (few, full)]
    assert shapes[0] * 4 == shapes[1] * kv_heads


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.Attention(H, K, kv_heads=3), "heads=4 must be a multiple of kv_heads=3"),
        (lambda: layers.Attention(H, K, window=-1), "window must be at least 0 positions, found"),
        (lambda: layers.Attention(H, K, dropout=1.0), "dropout must be at least 0 and less than 1, found"),
        (lambda: layers.LocalAttention(H, K), "LocalAttention: window must be at least 1 position, found"),
        (lambda: layers.LocalAttention(H, K, window=2, rotary=layers.Rotary()), r"not.*Attention\(window"),
        (lambda: layers.RelativeBias(5), "buckets=5 must be even and at least 4"),
        (
            lambda: layers.RelativeBias(32, 8),
            "RelativeBias: max_distance=8 must be more than 8, the number of",
        ),
    ],
)
def test_bad_fields(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda g, x: layers.Attention(H, K, causal=True)(x, x),
            "causal, window and rotary need keys from the queries' own",
        ),
        (lambda g, x: layers.LocalAttention(H, K, window=3)(x), "must be a multiple of window=3"),
        (
            lambda g, x: layers.LocalAttention(H, K, window=2)(x, x),
            "LocalAttention: rotary, memory, mask and segments are not",
        ),
        (lambda g, x: layers.Attention(H, mtf.Dim("d_kv", 3), rotary=layers.Rotary())(x), "must be even"),
    ],
)
def test_bad_calls(build: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        run(build, {"x": X})
