"""Adaptive embeddings and softmax, mixtures of softmaxes: against NumPy, under layouts that split tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from tests.layers.helper import Run, check_layouts, run

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
IDS = ("batch:4 length:8", RNG.integers(0, 16, (4, 8)))
D = mtf.Dim("d_model", 8)
CLUSTERS = (layers.VocabularyCluster(4), layers.VocabularyCluster(4, 4), layers.VocabularyCluster(8, 2))
EMBEDDING = layers.AdaptiveEmbedding(CLUSTERS, D, stddev=0.5)
LAYOUTS = [
    ("x:2;y:2", "batch:x;vocab_0:y;vocab_1:y;vocab_2:y"),
    ("x:2;y:2", "vocab_0:x;vocab_2:x+y"),
    ("x:2;y:2", "d_model:x;length:y"),
]
SPLIT_CLUSTERS = ("x:2;y:2", "clusters:x;width_1:y")


def log_softmax(x: Any) -> Any:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def whole_tables(w: dict[str, Any]) -> list[Any]:
    """Every cluster's table as wide as the model."""
    ups = [np.eye(8), w["embedding/up_1"], w["embedding/up_2"]]
    return [w[f"embedding/tokens_{i}"] @ up for i, up in enumerate(ups)]


def test_adaptive_embedding_and_its_logits() -> None:
    def build(g: mtf.Graph, ids: mtf.Tensor) -> mtf.Tensor:
        tables = EMBEDDING.tables(g)
        return EMBEDDING.logits(mtf.tanh(EMBEDDING(tables, ids.cast("int32"))), tables)

    dense = check_layouts(build, {"ids": IDS}, [*LAYOUTS, ("x:2;y:2", "vocab:x;vocab_1:y;width_2:x")])
    table = np.concatenate(whole_tables(dense.variables))
    np.testing.assert_allclose(dense.out, np.tanh(table[IDS[1]]) @ table.T, rtol=1e-4, atol=1e-5)
    assert dense.variables["embedding/tokens_2"].shape == (8, 2)


def test_a_factorised_table_is_one_cluster() -> None:
    embedding = layers.AdaptiveEmbedding((layers.VocabularyCluster(16, 2),), D)
    got = run(lambda g, ids: embedding(embedding.tables(g), ids.cast("int32")), {"ids": IDS})
    w = got.variables
    table = w["embedding/tokens_0"] @ w["embedding/up_0"]
    np.testing.assert_allclose(got.out, table[IDS[1]], rtol=1e-4, atol=1e-6)


def log_p(w: dict[str, Any], x: Any) -> Any:
    """Token by token, as the paper's two steps."""
    head, *tails = (x @ t.T for t in whole_tables(w))
    first = log_softmax(np.concatenate([head, x @ w["adaptive_softmax/clusters"]], -1))
    parts = [first[..., 4 + i, None] + log_softmax(tail) for i, tail in enumerate(tails)]
    return np.concatenate([first[..., :4], *parts], -1)


def adaptive(kind: str, clusters: tuple[layers.VocabularyCluster, ...] = CLUSTERS) -> Any:
    embedding = layers.AdaptiveEmbedding(clusters, D, stddev=0.5)
    softmax = layers.AdaptiveSoftmax(embedding)

    def build(g: mtf.Graph, x: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
        tables = embedding.tables(g)
        if kind == "loss":
            return softmax.loss(x, tables, ids.cast("int32"))
        return softmax.log_probabilities(x, tables)

    return build


def test_adaptive_softmax_gives_probabilities() -> None:
    layouts = [*LAYOUTS, SPLIT_CLUSTERS, ("x:2;y:2", "vocab:x;vocab_1:y")]
    dense = check_layouts(adaptive("log p"), {"x": X, "ids": IDS}, layouts)
    np.testing.assert_allclose(dense.out, log_p(dense.variables, X[1]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.exp(dense.out).sum(-1), 1.0, rtol=1e-5)


def test_adaptive_softmax_loss_is_that_of_its_probabilities() -> None:
    dense = check_layouts(adaptive("loss"), {"x": X, "ids": IDS}, [*LAYOUTS, SPLIT_CLUSTERS])
    want = -np.take_along_axis(log_p(dense.variables, X[1]), IDS[1][..., None], -1)[..., 0]
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_a_share_of_the_positions_has_room_for_rare_tokens() -> None:
    """With room for all the loss and its gradient are the same; later tokens beyond it count as known."""
    half = (CLUSTERS[0], layers.VocabularyCluster(4, 4, 0.75), layers.VocabularyCluster(8, 2, 0.5))
    ids = np.array([[0, 8, 9, 4, 1, 5, 10, 11], [8, 9, 10, 11, 12, 13, 1, 2], *IDS[1][2:]])
    ids[2:] %= 4
    inputs = {"x": X, "ids": (IDS[0], ids)}
    layouts = [*LAYOUTS, ("x:2;y:2", "slot_1:x;slot_2:x;vocab_2:y"), ("x:2;y:2", "length:y;slot_2:x")]
    got = check_layouts(adaptive("loss", half), inputs, layouts)
    want = -np.take_along_axis(log_p(got.variables, X[1]), ids[..., None], -1)[..., 0]
    w = got.variables
    head = log_softmax(
        np.concatenate([X[1] @ whole_tables(w)[0].T, X[1] @ w["adaptive_softmax/clusters"]], -1)
    )
    want[1, 4:6] = -head[1, 4:6, 5]
    np.testing.assert_allclose(got.out, want, rtol=1e-4, atol=1e-5)


VOCAB = mtf.Dim("vocab", 16)
TABLE = layers.Embedding(VOCAB, D, stddev=0.5)
SPLIT = [
    ("x:2;y:2", "batch:x;vocab:y"),
    ("x:2;y:2", "vocab:x+y"),
    ("x:2;y:2", "d_model:x;length:y"),
]


def mixed(w: dict[str, Any]) -> Any:
    m = {n.removeprefix("mixture_of_softmaxes/"): v for n, v in w.items()}
    contexts = np.tanh(np.einsum("bld,dce->blce", X[1], m["context"]))
    each = np.exp(log_softmax(contexts @ w["embedding/tokens"].T))
    prior = np.exp(log_softmax(X[1] @ m["prior"]))
    return np.log((prior[..., None] * each).sum(2))


@pytest.mark.parametrize("kind", ["log p", "loss"])
def test_mixture_of_softmaxes(kind: str) -> None:
    layer = layers.MixtureOfSoftmaxes(2)

    def build(g: mtf.Graph, x: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
        table = TABLE.table(g)
        return layer.loss(x, table, ids.cast("int32")) if kind == "loss" else layer(x, table)

    dense = check_layouts(build, {"x": X, "ids": IDS}, [*SPLIT, ("x:2;y:2", "components:x;d_model_in:y")])
    want = mixed(dense.variables)
    want = -np.take_along_axis(want, IDS[1][..., None], -1)[..., 0] if kind == "loss" else want
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_mixtape() -> None:
    layer = layers.Mixtape(gate_width=4, frequent=6)
    layouts = [*SPLIT, ("x:2;y:2", "gates:x;frequent:y"), ("x:2;y:2", "vocab:x;gate_width:y")]
    dense = check_layouts(lambda g, x: layer(x, TABLE.table(g)), {"x": X}, layouts)
    w = {n.removeprefix("mixtape/"): v for n, v in dense.variables.items()}
    contexts = np.tanh(np.einsum("bld,dge->blge", X[1], w["context"]))
    logits = contexts @ w["embedding/tokens"].T
    turns = np.broadcast_to((X[1] @ w["shared"])[:, :, None], (4, 8, 16, 3)).copy()
    made = np.tanh(np.einsum("bld,dtw->bltw", X[1], w["gates"]))
    turns[:, :, :6] += np.einsum("bltw,fw->blft", made, w["tokens"])
    a, b, c = np.moveaxis(1 / (1 + np.exp(-turns)), -1, 0)
    gates = np.stack([a * b, a * (1 - b), (1 - a) * c, (1 - a) * (1 - c)], -1)
    np.testing.assert_allclose(gates.sum(-1), 1)
    want = np.einsum("blgv,blvg->blv", logits, gates)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def no_table(g: mtf.Graph, x: mtf.Tensor) -> Run:
    return layers.Mixtape(4, 16)(x, TABLE.table(g))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.VocabularyCluster(0), "count must be at least 1, width at least 0, and share more"),
        (lambda: layers.VocabularyCluster(4, share=0), "count must be at least 1"),
        (
            lambda: layers.AdaptiveEmbedding((), D),
            "AdaptiveEmbedding: `clusters` must have at least one cluster",
        ),
        (
            lambda: layers.AdaptiveSoftmax(layers.AdaptiveEmbedding(CLUSTERS[:1], D)),
            "AdaptiveSoftmax: the embedding must have at least two clusters",
        ),
        (lambda: layers.MixtureOfSoftmaxes(0), "components must be positive, found 0"),
        (lambda: layers.Mixtape(0, 1), "Mixtape: gate_width and frequent must be positive, found"),
        (lambda: run(no_table, {"x": X}), "Mixtape: frequent=16 must be less than the size of"),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()
