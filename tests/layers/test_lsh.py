"""Attention among positions that hash alike: against NumPy by the paper's definition, and under layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.layers.base import project
from tests.layers.helper import check_layouts, run

H, K, R = mtf.Dim("heads", 2), mtf.Dim("d_kv", 4), mtf.Dim("rounds", 2)
X = ("batch:4 length:16 d_model:8", np.random.default_rng(0).normal(size=(4, 16, 8)))
LAYOUTS = [
    ("x:2;y:2", "batch:x+y"),
    ("x:2;y:2", "batch:x;heads:y"),
    ("x:2;y:2", "rounds:x;heads:y"),
    ("x:2;y:2", "chunks:x;d_kv:y"),
    ("x:2;y:2", "length:x;d_model:y"),
    ("x:2;y:2", "sorted_length:x;chunks:x;length:y"),
    ("x:2;y:2", "rotations:x;batch:y"),
]
PLAIN = layers.LSHAttention(H, K, chunk=4, buckets=4, rounds=R)
KINDS = {
    "plain": PLAIN,
    "causal": replace(PLAIN, causal=True),
    "causal, own bucket": replace(PLAIN, causal=True, within_buckets=True),
    "one round, own bucket": replace(PLAIN, rounds=mtf.Dim("rounds", 1), within_buckets=True),
    "chunks as long as the sequence": replace(PLAIN, chunk=16, causal=True),
}


def buckets(kind: layers.LSHAttention) -> Any:
    """[batch, rounds, heads, length]: the hashes that the layer computes first of all."""

    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        with g.scope(kind.name):
            q = project(x, "qk", [x.dim("d_model")], [H, K])
        found = kind.hashes(q).cast("float32")
        return found * g.variable("one", [], mtf.ONES) + mtf.reduce_sum(q) * 0.0

    return run(build, {"x": X}).out.astype(int)


def reference(kind: layers.LSHAttention, w: dict[str, Any], x: Any, hashed: Any) -> Any:
    """Equations 2 to 5, position by position."""
    q, v = (np.einsum("bld,dhk->bhlk", x, w[f"lsh_attention/{n}"]) for n in ("qk", "v"))
    out = np.zeros_like(q)
    for b, h in np.ndindex(q.shape[:2]):
        k = q[b, h] / np.linalg.norm(q[b, h], axis=-1, keepdims=True)
        logits, rounds = q[b, h] @ k.T, []
        for own in hashed[b, :, h]:
            place = np.empty(len(own), int)
            place[np.argsort(own, kind="stable")] = np.arange(len(own))
            chunk = place // kind.chunk
            behind = chunk[:, None] - chunk
            seen = (behind == 0) | (behind == 1)
            if kind.causal:
                seen &= np.tri(len(own), dtype=bool)
            if kind.within_buckets:
                seen &= own[:, None] == own
            alone = np.where(np.eye(len(own), dtype=bool), -1e5, logits)
            rounds.append(np.where(seen, alone, -np.inf))
        e = np.exp(np.stack(rounds) - np.stack(rounds).max((0, 2), keepdims=True))
        out[b, h] = np.einsum("rlm,mk->lk", e / e.sum((0, 2), keepdims=True), v[b, h])
    return np.einsum("bhlk,hkd->bld", out, w["lsh_attention/o"])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.one_in(4)
def test_kinds(name: str) -> None:
    kind = KINDS[name]
    layouts = [(m, t) for m, t in LAYOUTS if kind.chunk < 16 or "chunks" not in t]
    if kind.rounds.size == 1:
        layouts = [(m, t) for m, t in layouts if "rounds" not in t]
    dense = check_layouts(lambda g, x: kind(x), {"x": X}, layouts)
    hashed = buckets(kind)
    assert len(np.unique(hashed)) == kind.buckets
    want = reference(kind, dense.variables, X[1], hashed)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rounds", [1, 3])
def test_one_chunk_is_full_attention(causal: bool, rounds: int) -> None:
    """With queries as keys of length 1, where a position sees itself only if it sees nothing else."""
    kind = replace(PLAIN, chunk=16, causal=causal, rounds=mtf.Dim("rounds", rounds))
    got = run(lambda g, x: kind(x), {"x": X})
    w = got.variables
    q, v = (np.einsum("bld,dhk->bhlk", X[1], w[f"lsh_attention/{n}"]) for n in ("qk", "v"))
    e = np.exp(np.einsum("bhlk,bhmk->bhlm", q, q / np.linalg.norm(q, axis=-1, keepdims=True)))
    e = e * (np.tri(16, k=-1) if causal else 1 - np.eye(16))
    if causal:
        e[:, :, 0, 0] = 1
    mixed = np.einsum("bhlm,bhmk->bhlk", e / e.sum(-1, keepdims=True), v)
    want = np.einsum("bhlk,hkd->bld", mixed, w["lsh_attention/o"])
    np.testing.assert_allclose(got.out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "causal, own bucket"])
def test_gradient_by_differences(name: str) -> None:
    g = mtf.Graph()
    b, s, d = mtf.Dim("batch", 2), mtf.Dim("length", 16), mtf.Dim("d_model", 8)
    x = g.input("x", [b, s, d], "float64")
    y = KINDS[name](x)
    loss = mtf.reduce_sum(mtf.sin(y * 3.0))
    (dx,) = mtf.gradients(loss, [x])
    assert dx is not None
    engine = LockstepEngine(mtf.lower(g, mtf.Mesh("m:1"), mtf.Layout(""), {"loss": loss, "dx": dx}))
    at, rng = X[1][:2], np.random.default_rng(1)
    found = engine.step({"x": at})["dx"]
    for _ in range(4):
        way = rng.normal(size=at.shape)
        up, down = (engine.step({"x": at + e * way})["loss"] for e in (1e-6, -1e-6))
        assert (up - down) / 2e-6 == pytest.approx((found * way).sum(), rel=1e-6)


def test_split_chunks_exchange_one_chunk() -> None:
    made = run(lambda g, x: PLAIN(x), {"x": X}, "x:2", "chunks:x")
    sent = [i for i, _ in made.program.walk() if type(i).__name__ == "Permute"]
    assert sent
    for i in sent:
        assert made.program.values[i.inputs[0]].local(made.program.mesh).shape.dim("chunks").size == 1


def test_hashes_are_others_in_every_layer() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        q = project(x, "qk", [x.dim("d_model")], [H, K])
        _, (both,) = mtf.scan(lambda h: (h, [PLAIN.hashes(q).cast("float32")]), x, mtf.Dim("layers", 2))
        return both * g.variable("one", [], mtf.ONES) + mtf.reduce_sum(q) * 0.0

    first, second = run(build, {"x": X}).out
    assert (first != second).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(PLAIN, chunk=0), "chunk must be at least 1 position, found 0"),
        (lambda: replace(PLAIN, buckets=3), "buckets must be even and at least 2, found 3"),
        (lambda: replace(PLAIN, dropout=1.0), "dropout must be at least 0 and less than 1, found"),
        (
            lambda: run(lambda g, x: replace(PLAIN, chunk=5)(x), {"x": X}),
            "length=16 must be a multiple of chunk=5",
        ),
        (
            lambda: run(lambda g, x: replace(PLAIN, buckets=2**30)(x), {"x": X}),
            "=16 times buckets=1073741824 must be less than 2",
        ),
    ],
)
def test_bad_fields(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()
