"""Kinds of attention against NumPy, head by head, and under layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.ir.phase import Phase
from tests.layers.helper import check_layouts, run
from tests.layers.test_attention import t5_bucket

H, K = mtf.Dim("heads", 2), mtf.Dim("d_kv", 4)
RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
MEMORY = ("batch:4 memory_length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
LAYOUTS = [
    ("x:2;y:2", "batch:x;heads:y"),
    ("x:2;y:2", "length:x;memory_length:y"),
    ("x:2;y:2", "length:y;d_kv:x"),
    ("x:2;y:2", "d_model:x;batch:y"),
]


def softmax(x: Any, axis: int = -1) -> Any:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def heads_of(x: Any, w: Any) -> Any:
    """[batch, length, d_model] times [d_model, heads..., d_kv]: [batch, heads..., length, d_kv]."""
    return np.moveaxis(np.tensordot(x, w, 1), 1, -2)


def causal(n: int) -> Any:
    return np.tril(np.ones((n, n), bool))


def masked(logits: Any, seen: Any) -> Any:
    return np.where(seen, logits, -1e9)


def names(variables: dict[str, Any]) -> dict[str, Any]:
    return {n.removeprefix("attention/"): v for n, v in variables.items()}


def test_masks() -> None:
    ids = np.array([[3, 4, 0, 5], [0, 1, 1, 0]])
    segments = np.array([[1, 1, 2, 2], [1, 2, 3, 3]])

    def build(g: mtf.Graph, ids: mtf.Tensor, segments: mtf.Tensor) -> mtf.Tensor:
        seen = (
            layers.padding_mask(ids.cast("int32"))
            & layers.segment_mask(segments.cast("int32"))
            & layers.causal_mask(g, mtf.Dim("length", 4), mtf.Dim("memory_length", 4))
        )
        dims = [mtf.Dim("batch", 2), mtf.Dim("length", 4), mtf.Dim("memory_length", 4)]
        return mtf.transpose(seen.cast("float32") * g.variable("one", [], mtf.ONES), dims)

    inputs = {"ids": ("batch:2 length:4", ids), "segments": ("batch:2 length:4", segments)}
    layouts = [("x:2;y:2", "batch:x;length:y"), ("x:2;y:2", "memory_length:x;length:y")]
    got = check_layouts(build, inputs, layouts).out
    want = (ids != 0)[:, None] & (segments[:, None] == segments[..., None]) & causal(4)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dynamic", [(), ("x2l", "m2w"), ("m2l", "x2w")])
def test_talking_heads(dynamic: tuple[str, ...]) -> None:
    kind = layers.TalkingHeadsAttention(
        H,
        K,
        key_heads=mtf.Dim("key_heads", 2),
        softmax_heads=mtf.Dim("softmax_heads", 3),
        value_heads=mtf.Dim("value_heads", 4),
        dynamic=dynamic,
        causal=True,
    )
    layouts = [*LAYOUTS, ("x:2;y:2", "key_heads:x;value_heads:y")]
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, layouts)
    w, x = names(dense.variables), X[1]

    def mixer(name: str) -> Any:
        """[batch, query, key, heads, before, after]."""
        out = np.zeros((4, 8, 8, *w[name].shape)) + w[name]
        if f"x2{name[0]}" in dynamic:
            out = out + np.tensordot(x, w[f"x2{name[0]}"], 1)[:, :, None]
        if f"m2{name[0]}" in dynamic:
            out = out + np.tensordot(x, w[f"m2{name[0]}"], 1)[:, None]
        return out

    q, k, v = (heads_of(x, w[n]) for n in "qkv")
    products = np.einsum("bhilk,bhimk->bhilm", q, k) / 2
    logits = np.einsum("bhilm,blmhij->bhjlm", products, mixer("logits"))
    weights = softmax(masked(logits, causal(8)))
    weights = np.einsum("bhilm,blmhij->bhjlm", weights, mixer("weights"))
    want = np.einsum("bhilm,bhimk,hikd->bld", weights, v, w["o"])
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_talking_heads_with_a_memory_and_a_bias() -> None:
    """The bias belongs to the softmax heads; a constant one changes nothing."""
    kind = layers.TalkingHeadsAttention(
        mtf.Dim("heads", 1),
        K,
        key_heads=H2[0],
        softmax_heads=H2[1],
        value_heads=H2[2],
    )

    def build(g: mtf.Graph, x: mtf.Tensor, m: mtf.Tensor, b: mtf.Tensor) -> mtf.Tensor:
        return kind(x, m, bias=b)

    assert kind.head_dims[1] == H2[1]
    bias = ("heads:1 softmax_heads:4", RNG.normal(size=(1, 4)))
    inputs = {"x": X, "m": MEMORY, "b": bias}
    with_bias = check_layouts(build, inputs, LAYOUTS[1:2])
    without = run(lambda g, x, m: kind(x, m), {"x": X, "m": MEMORY})
    np.testing.assert_allclose(with_bias.out, without.out, rtol=1e-4, atol=1e-5)


H2 = [mtf.Dim(f"{n}_heads", 4) for n in ("key", "softmax", "value")]


@pytest.mark.parametrize("is_causal", [False, True])
def test_compressed(is_causal: bool) -> None:
    kind = layers.CompressedAttention(H, K, causal=is_causal, compression=2)
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, LAYOUTS)
    w, x = names(dense.variables), X[1]
    means = x.reshape(4, 4, 2, 8).mean(2)
    q, k, v = heads_of(x, w["q"]), heads_of(means, w["k"]), heads_of(means, w["v"])
    e = np.exp(np.einsum("bhlk,bhmk->bhlm", q, k) / 2)
    if is_causal:
        e = np.where(np.arange(4) * 2 + 1 <= np.arange(8)[:, None], e, 0)
    weights = e / (e.sum(-1, keepdims=True) + 1)
    want = np.einsum("bhlm,bhmk,hkd->bld", weights, v, w["o"])
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)
    assert not is_causal or (dense.out[:, 0] == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_doubly_normalized(is_causal: bool) -> None:
    kind = layers.DoublyNormalizedAttention(H, K, causal=is_causal)
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, LAYOUTS)
    w, x = names(dense.variables), X[1]
    q, k, v = (heads_of(x, w[n]) for n in "qkv")
    logits = np.einsum("bhlk,bhmk->bhlm", q, k) / 2
    seen = causal(8) if is_causal else np.ones((8, 8), bool)
    shares = np.where(seen, np.exp(logits), 0)
    shares = shares / shares.sum(-2, keepdims=True)
    weights = 0.5 * shares / shares.sum(-1, keepdims=True) + 0.5 * softmax(masked(logits, seen))
    want = np.einsum("bhlm,bhmk,hkd->bld", weights, v, w["o"])
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_a_key_that_no_query_sees_stays_hidden() -> None:
    """Normalised over the queries it would have equal shares of all."""
    kind = layers.DoublyNormalizedAttention(H, K)
    seen = ("memory_length:8", (np.arange(8) != 3).astype(float))

    def build(g: mtf.Graph, x: mtf.Tensor, m: mtf.Tensor, s: mtf.Tensor) -> mtf.Tensor:
        return kind(x, m, mask=s > 0.5)

    other = MEMORY[1].copy()
    other[:, 3] = 9.0
    a, b = (run(build, {"x": X, "m": (MEMORY[0], m), "s": seen}).out for m in (MEMORY[1], other))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_bilinear() -> None:
    kind = layers.BilinearAttention(H, mtf.Dim("d_kv", 8))
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, LAYOUTS)
    w, x = names(dense.variables), X[1]
    weights = softmax(np.einsum("bld,dhk,bmk->bhlm", x, w["q"], x) / np.sqrt(8))
    want = np.einsum("bhlm,bmk,hkd->bld", weights, x, w["o"])
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_branched() -> None:
    kind = layers.BranchedAttention(H, K, d_ff=mtf.Dim("d_ff", 16))
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, [*LAYOUTS, ("x:2;y:2", "d_ff:x;heads:y")])
    w, x = names(dense.variables), X[1]
    q, k, v = (heads_of(x, w[n]) for n in "qkv")
    weights = softmax(np.einsum("bhlk,bhmk->bhlm", q, k) / 2)
    branch = np.einsum("bhlm,bhmk,hkd->blhd", weights, v, w["o"]) * softmax(w["kappa"])[:, None]
    branch = np.maximum(branch @ w["feed_forward/wi"], 0) @ w["feed_forward/wo"]
    want = (branch * softmax(w["alpha"])[:, None]).sum(2)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ["random", "factorized", "dense"])
def test_synthesizer(name: str, mixed: bool) -> None:
    kind = layers.Synthesizer(H, K, kind=name, rank=3, mixed=mixed, causal=True)
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, LAYOUTS[:3])
    w, x = names(dense.variables), X[1]
    if name == "random":
        logits = np.broadcast_to(w["made"], (4, 2, 8, 8))
    elif name == "factorized":
        logits = np.broadcast_to(np.einsum("hlr,hmr->hlm", w["left"], w["right"]), (4, 2, 8, 8))
    else:
        logits = np.einsum("bhlk,hkm->bhlm", np.maximum(heads_of(x, w["q"]), 0), w["made"])
    if mixed:
        products = np.einsum("bhlk,bhmk->bhlm", heads_of(x, w["q"]), heads_of(x, w["k"])) / 2
        logits = (products + logits) / 2
    weights = softmax(masked(logits, causal(8)))
    want = np.einsum("bhlm,bhmk,hkd->bld", weights, heads_of(x, w["v"]), w["o"])
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)
    assert ("q" in w) == (mixed or name == "dense")


@pytest.mark.parametrize("kv_heads", [0, 1])
def test_relative(kv_heads: int) -> None:
    positions = layers.RelativeBias(8, 6)
    kind = layers.RelativeAttention(H, K, kv_heads, causal=True, positions=positions)
    layouts = [*LAYOUTS, ("x:2;y:2", "buckets:x;heads:y")]
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, layouts)
    w, x = names(dense.variables), X[1]
    q = heads_of(x, w["q"])
    k, v = (heads_of(x, w[n]) if not kv_heads else np.repeat((x @ w[n])[:, None], 2, 1) for n in "kv")
    apart = np.arange(8) - np.arange(8)[:, None]
    bucket = t5_bucket(apart, True, 8, 6)
    logits = (
        np.einsum("bhlk,bhmk->bhlm", q, k)
        + np.einsum("bhlk,hkn->bhln", q, w["positions"])[:, :, np.arange(8)[:, None], bucket]
    )
    weights = softmax(masked(logits / 2, causal(8)))
    want = np.einsum("bhlm,bhmk,hkd->bld", weights, v, w["o"])
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


IMAGE = ("batch:2 height:8 width:4 d_model:8", RNG.normal(size=(2, 8, 4, 8)))
SPLIT_IMAGES = [
    ("x:2;y:2", "height:x;height_blocks:x;width:y;width_blocks:y"),
    ("x:2;y:2", "batch:x;heads:y"),
    ("x:4", "height:x;height_blocks:x"),
    ("x:2;y:2", "pixel:x;d_model:y"),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [2, 4])
def test_local_attention_in_two_dimensions(window: int, is_causal: bool) -> None:
    """Every pixel against every other, with a mask of distances."""
    kind = layers.LocalAttention2D(H, K, window=window, causal=is_causal)
    layouts = SPLIT_IMAGES if window == 2 else [("x:2;y:2", "height:x;height_blocks:x;heads:y")]
    dense = check_layouts(lambda g, x: kind(x), {"x": IMAGE}, layouts)
    w, x = names(dense.variables), IMAGE[1].reshape(2, 32, 8)
    row, column = np.divmod(np.arange(32), 4)
    dy, dx = row - row[:, None], column - column[:, None]
    seen = (abs(dy) < window) & (abs(dx) < window)
    if is_causal:
        seen &= (dy < 0) | ((dy == 0) & (dx <= 0))
    q, k, v = (heads_of(x, w[n]) for n in "qkv")
    weights = softmax(masked(np.einsum("bhlk,bhmk->bhlm", q, k) / 2, seen))
    want = np.einsum("bhlm,bhmk,hkd->bld", weights, v, w["o"]).reshape(IMAGE[1].shape)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_split_images_exchange_their_borders_only() -> None:
    kind = layers.LocalAttention2D(H, K, window=2)
    made = run(lambda g, x: kind(x), {"x": IMAGE}, *SPLIT_IMAGES[0])
    kinds = {type(i).__name__ for i, _ in made.program.walk() if i.origin.phase == Phase.FORWARD}
    assert "Permute" in kinds
    assert not kinds & {"AllGather", "AllToAll"}


def talking(**more: Any) -> layers.TalkingHeadsAttention:
    chosen = {"key_heads": H2[0], "softmax_heads": H2[1], "value_heads": H2[2], **more}
    return layers.TalkingHeadsAttention(H, K, **chosen)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: talking(key_heads=H), "must have four different names"),
        (lambda: talking(kv_heads=1), "kv_heads and shared_kv are not supported; set key_heads"),
        (lambda: talking(dynamic=("x2y",)), "'x2y' in `dynamic` is unknown; .*known: m2l, m2w, x2l, x2w"),
        (lambda: layers.CompressedAttention(H, K, compression=0), "compression must be positive, found 0"),
        (
            lambda: layers.CompressedAttention(H, K, extra_logit=None),
            "CompressedAttention: remove rotary, which is not supported, and",
        ),
        (
            lambda: layers.BilinearAttention(H, K, kv_heads=1),
            "BilinearAttention: kv_heads and shared_kv are not supported; remove",
        ),
        (lambda: layers.BranchedAttention(mtf.Dim("heads", 4), K, kv_heads=2, d_ff=K), "must be 0 or 1"),
        (lambda: layers.Synthesizer(H, K, kind="rand"), "kind='rand' is unknown; did you mean 'random'"),
        (lambda: layers.Synthesizer(H, K, rank=0), "rank must be positive, found 0"),
        (
            lambda: layers.Synthesizer(H, K, kv_heads=1),
            "Synthesizer: kv_heads, shared_kv and rotary are not",
        ),
        (lambda: layers.LocalAttention2D(H, K), "LocalAttention2D: window must be at least 1 pixel, found"),
        (
            lambda: layers.LocalAttention2D(H, K, window=2, rotary=layers.Rotary()),
            "LocalAttention2D: rotary, memory, mask, bias and segments are not",
        ),
    ],
)
def test_bad_fields(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g, x: layers.CompressedAttention(H, K, compression=3)(x), "memory_length=8 must be a multip"),
        (
            lambda g, x: layers.RelativeAttention(H, K, positions=layers.RelativeBias())(x, x),
            "RelativeAttention: a separate `memory` is not supported,",
        ),
        (lambda g, x: layers.BilinearAttention(H, K)(x), "must have the same size as"),
        (
            lambda g, x: layers.LocalAttention2D(H, K, window=3, height="batch", width="length")(x),
            "must be a multiple of window=3",
        ),
        (
            lambda g, x: layers.LocalAttention2D(H, K, window=2)(x, x),
            "LocalAttention2D: rotary, memory, mask, bias and segments are not",
        ),
    ],
)
def test_bad_calls(build: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        run(build, {"x": X})
