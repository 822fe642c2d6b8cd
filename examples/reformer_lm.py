"""A Reformer (Kitaev, Kaiser, Levskaya 2020): a language model with reversible layers, so that activation
memory does not grow with their number, and with attention among positions that have equal hashes.

    layoutopt search examples/reformer_lm.py --mesh "data:2;model:4" --set length=4096 --set layers=24
    layoutopt train examples/reformer_lm.py --layout auto --mesh "data:2;model:4" --steps 200
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn


@trained()
def model(
    layers: int = 6,
    d_model: int = 256,
    d_kv: int = 32,
    heads: int = 8,
    d_ff: int = 1024,
    gated: bool = False,
    chunk: int = 32,
    buckets: int = 0,
    rounds: int = 2,
    ff_chunks: int = 1,
    vocab: int = 256,
    batch: int = 8,
    length: int = 256,
    positions: str = "learned",
    tied: bool = False,
    dropout: float = 0.0,
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model.

    Args:
      d_kv: size of one head.
      gated: three feed-forward matrices, silu(x a) * (x b), instead of two with relu.
      chunk: positions that attend to one another and to the chunk before, once sorted by their hashes.
      buckets: values of the hash; 0 means about 2 length / chunk, as in the paper.
      rounds: independent hashes.
      ff_chunks: parts of the length that the feed-forward block takes one after the other; recompute
        `ff_chunks` to hold the hidden layer of one at a time.
      positions: learned, none, or the number of learned positions.
      tied: the output projection is the embedding.
      dtype: of activations; variables and their updates are float32. Inputs of layers are computed back from
        their outputs, which float32 does almost exactly and bfloat16 does not.
    """
    g = training.graph("reformer_lm")
    b, s = mtf.Dim("batch", batch), mtf.Dim("length", length)
    d, v = mtf.Dim("d_model", d_model), mtf.Dim("vocab", vocab)
    if ff_chunks < 1 or length % ff_chunks:
        raise mtf.UserError(
            f"length={length} is not a multiple of ff_chunks={ff_chunks}; change one of the two"
        )
    attention = nn.LSHAttention(
        mtf.Dim("heads", heads),
        mtf.Dim("d_kv", d_kv),
        chunk,
        buckets or 2 * max(1, length // chunk),
        mtf.Dim("rounds", rounds),
        causal=True,
        dropout=dropout,
    )
    dense = nn.FeedForward(mtf.Dim("d_ff", d_ff), "silu" if gated else "relu", gated, dropout=dropout)
    parts = [mtf.Dim("ff_chunks", ff_chunks), mtf.Dim("ff_length", length // ff_chunks)]

    def attend(x: mtf.Tensor) -> mtf.Tensor:
        return mtf.dropout(attention(nn.LayerNorm(name="attention_norm")(x)), dropout)

    def feed_forward(x: mtf.Tensor) -> mtf.Tensor:
        x = nn.LayerNorm(name="feed_forward_norm")(x)
        if ff_chunks == 1:
            return mtf.dropout(dense(x), dropout)
        with g.sharing():
            cut = mtf.reshape(x, [b, *parts, d])
            _, (y,) = mtf.scan(lambda none, part: (none, [dense(part)]), (), parts[0], [cut])
        return mtf.dropout(mtf.reshape(mtf.transpose(y, [b, *parts, d]), x.shape), dropout)

    tokens, targets = g.input("tokens", [b, s]), g.input("targets", [b, s])
    embedding = nn.Embedding(v, d, training.dtype)
    table = embedding.table(g)
    x = embedding(table, tokens)
    if positions != "none":
        x = nn.LearnedPositions.named(positions, length, "none")(x)
    x = mtf.dropout(x, dropout)
    y1, y2 = mtf.reversible_scan(attend, feed_forward, x, x, mtf.Dim("layers", layers))
    logits = embedding.logits(nn.LayerNorm(name="final_norm")(y1 + y2), table if tied else None)
    return training.model(
        mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v)), "reformer_lm", (b, s)
    )


def data(
    batch: int = 8, length: int = 256, vocab: int = 256, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields windows of the standard library's source code as bytes; "held-out" yields other files."""
    from examples.text import batches

    return batches(batch, length, vocab, split)
