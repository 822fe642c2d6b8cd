"""A bidirectional Transformer that fills in masked tokens (Devlin et al. 2019, "BERT", section 3.1).

layoutopt search examples/bert.py --mesh "data:2;model:4"
layoutopt train examples/bert.py --layout auto --mesh "data:2;model:4" --steps 200
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn

MASKED = 0.15
"""The share of positions to predict."""


@trained(warmup=50)
def model(
    layers: int = 4,
    d_model: int = 256,
    d_kv: int = 32,
    heads: int = 8,
    d_ff: int = 1024,
    vocab: int = 256,
    batch: int = 16,
    length: int = 128,
    dropout: float = 0.0,
    attention: str = "fused",
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model: normalisation after every block, gelu, biases, an output tied to the embedding.

    Args:
      vocab: of the data; 0 (which the text does not contain) stands for a masked token.
      attention: "fused" (one operation that never stores all logits) or "plain" (products and a softmax).
    """
    g = training.graph("bert")
    b, length_dim = mtf.Dim("batch", batch), mtf.Dim("length", length)
    n = mtf.Dim("masked", count(length))
    d, v = mtf.Dim("d_model", d_model), mtf.Dim("vocab", vocab)
    heads_dim, d_kv_dim = mtf.Dim("heads", heads), mtf.Dim("d_kv", d_kv)
    attend = nn.Attention(heads_dim, d_kv_dim, dropout=dropout, attention=attention)
    feed_forward = nn.FeedForward(mtf.Dim("d_ff", d_ff), "gelu", bias=True, dropout=dropout)
    tokens = g.input("tokens", [b, length_dim])
    positions, targets = g.input("positions", [b, n]), g.input("targets", [b, n])
    embedding = nn.Embedding(v, d, training.dtype)
    table = embedding.table(g)

    def norm(x: mtf.Tensor, name: str) -> mtf.Tensor:
        return nn.LayerNorm(bias=True, name=name)(x)

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        x = norm(x + mtf.dropout(attend(x), dropout), "attention_norm")
        return norm(x + mtf.dropout(feed_forward(x), dropout), "feed_forward_norm")

    x = norm(nn.LearnedPositions(length)(embedding(table, tokens)), "embedding_norm")
    x = mtf.scan(layer, mtf.dropout(x, dropout), mtf.Dim("layers", layers))
    # Only the masked positions go on: the vocabulary is the widest product of the model.
    x = mtf.einsum([x, mtf.one_hot(positions, length_dim, training.dtype)], [b, n, d], chooses=True)
    x = mtf.rename(x, d_model="d_hidden")
    x = nn.Dense((d,), ("d_hidden",), bias=True, activation="gelu", name="transform")(x)
    logits = embedding.logits(norm(x, "transform_norm"), table)
    with g.scope("output"):
        logits = logits + g.variable("bias", [v], mtf.ZEROS, activation_dtype=training.dtype)
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v))
    right = mtf.reduce_mean(mtf.argmax(logits, v).equal(targets).cast("float32"))
    return training.model(loss, "bert", (b, length_dim), {"accuracy": right})


def count(length: int) -> int:
    """Number of masked positions of a sequence."""
    return max(1, round(length * MASKED))


def data(
    batch: int = 16, length: int = 128, vocab: int = 256, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Windows of the standard library's sources. Of the positions to predict, 80 % show 0, 10 % a random
    byte, 10 % the true one."""
    from examples.text import batches

    rng = np.random.default_rng(1)
    for window in batches(batch, length, vocab, split):
        tokens = window["tokens"].copy()
        positions = np.argsort(rng.random((batch, length)))[:, : count(length)].astype(np.int32)
        targets = np.take_along_axis(tokens, positions, 1)
        kind = rng.random(positions.shape)
        shown = np.where(kind < 0.8, 0, np.where(kind < 0.9, rng.integers(1, vocab, kind.shape), targets))
        np.put_along_axis(tokens, positions, shown.astype(tokens.dtype), 1)
        yield {"tokens": tokens, "positions": positions, "targets": targets}
