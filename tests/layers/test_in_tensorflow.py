"""Layers trained under a layout in TensorFlow, against one device in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.engines import open_engine
from tests.marks import by_day

Build = Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor]
H, K, F = mtf.Dim("heads", 2), mtf.Dim("d_kv", 4), mtf.Dim("d_ff", 16)
D, E, V = mtf.Dim("d_model", 8), mtf.Dim("experts", 4), mtf.Dim("vocab", 16)
B, S = mtf.Dim("batch", 4), mtf.Dim("length", 8)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8, 8)).astype(np.float32)
IDS = RNG.integers(0, 16, (4, 8)).astype(np.int32)
TALKING = layers.TalkingHeadsAttention(
    H,
    K,
    key_heads=mtf.Dim("key_heads", 2),
    softmax_heads=mtf.Dim("softmax_heads", 3),
    value_heads=mtf.Dim("value_heads", 4),
    dynamic=("x2l", "m2w"),
    causal=True,
)
CLUSTERS = (
    layers.VocabularyCluster(4),
    layers.VocabularyCluster(4, 4, 0.75),
    layers.VocabularyCluster(8, 2, 0.5),
)
TABLES = layers.AdaptiveEmbedding(CLUSTERS, D)


def added(pair: tuple[mtf.Tensor, mtf.Tensor]) -> mtf.Tensor:
    return pair[0] + pair[1]


def normalised(x: mtf.Tensor) -> mtf.Tensor:
    return mtf.tanh(layers.BatchNorm(("batch", "length"))(x))


def image(x: mtf.Tensor) -> mtf.Tensor:
    return mtf.reshape(x, [B, mtf.Dim("height", 4), mtf.Dim("width", 2), D])


def adaptive(x: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
    tables = TABLES.tables(x.graph)
    return layers.AdaptiveSoftmax(TABLES).loss(x + TABLES(tables, ids), tables, ids)


def two_levels(x: mtf.Tensor) -> mtf.Tensor:
    grid = mtf.reshape(x, [mtf.Dim("outer_batch", 2), mtf.Dim("batch", 2), S, D])
    return added(layers.MixtureOfExperts2D(mtf.Dim("rows", 2), mtf.Dim("columns", 4), F)(grid))


def mixture(router: layers.Router) -> Build:
    return lambda x, ids: added(layers.MixtureOfExperts(E, F, router)(x))


TOKENS = layers.Embedding(V, D)
RANDOM = layers.TokenChoice(1.0, chosen=2, later="random", z_loss=0.1, jitter=0.1)
CASES: dict[str, tuple[Build, str]] = {
    "batch norm in a scan": (
        lambda x, ids: mtf.scan(normalised, x, mtf.Dim("layers", 2)),
        "batch:x;length:y",
    ),
    "annealed dropout": (
        lambda x, ids: layers.AnnealedDropout(0.5, 0, 4)(layers.ScaleNorm()(layers.Sinusoids()(x))),
        "batch:x;d_model:y",
    ),
    "talking heads": (lambda x, ids: TALKING(x), "batch:x;heads:y"),
    "compressed": (lambda x, ids: layers.CompressedAttention(H, K, causal=True)(x), "length:x;heads:y"),
    "doubly normalised": (lambda x, ids: layers.DoublyNormalizedAttention(H, K)(x), "length:x;heads:y"),
    "branched": (lambda x, ids: layers.BranchedAttention(H, K, d_ff=F)(x), "batch:x;d_ff:y"),
    "synthesizer": (
        lambda x, ids: layers.Synthesizer(H, K, kind="dense", mixed=True)(x),
        "length:x;heads:y",
    ),
    "two dimensions": (
        lambda x, ids: layers.LocalAttention2D(H, K, window=2, causal=True)(image(x)),
        "batch:y;height_blocks:x",
    ),
    "adaptive softmax": (adaptive, "batch:x;vocab_2:y"),
    "mixture of softmaxes": (
        lambda x, ids: layers.MixtureOfSoftmaxes(3).loss(x, TOKENS.table(x.graph), ids),
        "batch:x;vocab:y",
    ),
    "mixtape": (lambda x, ids: layers.Mixtape(4, 6)(x, TOKENS.table(x.graph)), "batch:x;vocab:y"),
    "random second experts": (mixture(RANDOM), "batch:x+y;experts:x+y"),
    "largest gates": (mixture(layers.TokenChoice(1.0, kept="largest")), "batch:x;experts:x;d_ff:y"),
    "experts choose": (mixture(layers.ExpertChoice()), "batch:x;experts:x;d_ff:y"),
    "two levels": (lambda x, ids: two_levels(x), "outer_batch:x;batch:y;rows:y;columns:x"),
    "attention by experts": (
        lambda x, ids: added(layers.ExpertsAttention(layers.Attention(H, K), E)(x)),
        "batch:x;experts:x;heads:y",
    ),
    "memory": (
        lambda x, ids: layers.ProductKeyMemory(H, mtf.Dim("keys", 4), mtf.Dim("d_key", 4), 3)(x),
        "batch:x;memory_values:y",
    ),
    "dynamic convolution": (
        lambda x, ids: layers.LightConv(H, 3, dynamic=True, causal=True)(x),
        "length:x;heads:y",
    ),
}


def losses(build: Build, mesh: str, layout: str, engine: str) -> list[float]:
    g = mtf.Graph()
    x, ids = g.input("x", [B, S, D], "float32"), g.input("ids", [B, S])
    y = build(x, ids)
    used = mtf.reduce_sum(ids.cast("float32")) * 0.0
    target = mtf.random_normal(g.random_key(), y.shape)
    model = mtf.Model(mtf.reduce_mean(mtf.square(y - target)) + used, mtf.Adam(0.01))
    made = open_engine(model.lower(mtf.Mesh(mesh), mtf.Layout(layout)), engine)
    made.initialize()
    return [float(made.step({"x": X, "ids": IDS})["loss"]) for _ in range(3)]


@pytest.mark.parametrize("name", by_day(CASES, every=5))
@pytest.mark.one_in(4)
def test_training(name: str) -> None:
    build, layout = CASES[name]
    one = losses(build, "one:1", "", "lockstep")
    np.testing.assert_allclose(losses(build, "x:2;y:2", layout, "local"), one, rtol=2e-4)
    assert len(set(one)) == 3
