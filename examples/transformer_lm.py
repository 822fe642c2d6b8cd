"""A decoder-only Transformer language model on real text; its sizes reach every language model of the
Mesh-TensorFlow paper (Shazeer et al. 2018, section 9.1).

    layoutopt search examples/transformer_lm.py --mesh "data:2;model:4"
    layoutopt train examples/transformer_lm.py --layout auto --mesh "data:2;model:4" --steps 200
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.optimizers import by_name

_EXPERT = "batch:batch;vocab:model;d_ff:model;heads:model"
_PAPER = {
    4096: ("batch:32", "batch:batch"),
    8192: ("batch:32", "batch:batch"),
    16384: ("model:4;batch:8", _EXPERT),
    32768: ("model:4;batch:8", _EXPERT),
    65536: ("model:8;batch:16", _EXPERT),
    131072: ("batch:16;model:32", _EXPERT),
    262144: ("batch:16;model:32", _EXPERT),
}
"""d_ff -> the mesh and layout that the paper trained this size under (tensor2tensor's
mtf_transformer_paper_lm)."""


def model(
    layers: int = 4,
    d_model: int = 256,
    d_kv: int = 32,
    heads: int = 8,
    kv_heads: int = 0,
    d_ff: int = 1024,
    gated: bool = False,
    vocab: int = 256,
    batch: int = 16,
    length: int = 128,
    positions: str = "learned",
    tied: bool = False,
    dtype: str = "float32",
    optimizer: str = "adam",
    learning_rate: float = 0.001,
    dropout: float = 0.0,
) -> mtf.Model:
    """Builds the model.

    Args:
      d_kv: size of one head.
      kv_heads: heads of keys and values (grouped-query attention); 0 means as many as `heads`.
      gated: three feed-forward matrices, silu(x a) * (x b), instead of two with relu.
      positions: learned, none, or the number of learned positions.
      tied: the output projection is the embedding.
      dtype: of activations; variables and their updates are float32.
    """
    g = mtf.Graph("transformer_lm")
    b, s, m = mtf.Dim("batch", batch), mtf.Dim("length", length), mtf.Dim("memory_length", length)
    d, f, v = mtf.Dim("d_model", d_model), mtf.Dim("d_ff", d_ff), mtf.Dim("vocab", vocab)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise mtf.UserError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    h, k = mtf.Dim("heads", kv_heads), mtf.Dim("d_kv", d_kv)
    q_dims = [h, k] if kv_heads == heads else [h, mtf.Dim("group", heads // kv_heads), k]

    def weight(name: str, dims: list[mtf.Dim], fan_in: int) -> mtf.Tensor:
        return g.variable(name, dims, mtf.Normal(1 / math.sqrt(fan_in)), activation_dtype=dtype)

    def norm(x: mtf.Tensor, name: str) -> mtf.Tensor:
        return mtf.layer_norm(x, d, g.variable(name, [d], mtf.ONES, activation_dtype=dtype))

    def attention(x: mtf.Tensor) -> mtf.Tensor:
        q = mtf.einsum([x, weight("q", [d, *q_dims], d_model)], [b, s, *q_dims])
        memory = mtf.rename(x, length="memory_length")
        keys = mtf.einsum([memory, weight("k", [d, h, k], d_model)], [b, m, h, k])
        values = mtf.einsum([memory, weight("v", [d, h, k], d_model)], [b, m, h, k])
        logits = mtf.einsum([q, keys], [b, *q_dims[:-1], s, m]) * d_kv**-0.5
        causal = mtf.mtf_range(g, s) >= mtf.mtf_range(g, m)
        weights = mtf.dropout(mtf.masked_softmax(logits, causal, m), dropout)
        mixed = mtf.einsum([weights, values], [b, s, *q_dims])
        return mtf.einsum([mixed, weight("o", [*q_dims, d], heads * d_kv)], [b, s, d])

    def feed_forward(x: mtf.Tensor) -> mtf.Tensor:
        hidden = mtf.einsum([x, weight("wi", [d, f], d_model)], [b, s, f])
        if gated:
            hidden = mtf.silu(hidden) * mtf.einsum([x, weight("wg", [d, f], d_model)], [b, s, f])
        else:
            hidden = mtf.relu(hidden)
        return mtf.einsum([mtf.dropout(hidden, dropout), weight("wo", [f, d], d_ff)], [b, s, d])

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        with g.scope("attention"):
            x = x + mtf.dropout(attention(norm(x, "norm")), dropout)
        with g.scope("feed_forward"):
            return x + mtf.dropout(feed_forward(norm(x, "norm")), dropout)

    tokens, targets = g.input("tokens", [b, s]), g.input("targets", [b, s])
    with g.scope("embedding"):
        table = g.variable("tokens", [v, d], mtf.Normal(0.02), activation_dtype=dtype)
        x = mtf.gather(table, tokens, v)
        if positions != "none":
            count = length if positions == "learned" else int(positions)
            if count < length:
                raise mtf.UserError(f"positions={positions} is fewer than length={length}")
            p = mtf.Dim("length" if count == length else "positions", count)
            where = g.variable("positions", [p, d], mtf.Normal(0.02), activation_dtype=dtype)
            x = x + (
                where
                if count == length
                else mtf.rename(mtf.slice_dim(where, p, 0, length), positions="length")
            )
    x = mtf.scan(layer, mtf.dropout(x, dropout), mtf.Dim("layers", layers))
    x = norm(x, "final_norm")
    with g.scope("output"):
        out = table if tied else weight("projection", [v, d], d_model)
        logits = mtf.einsum([x, out], [b, s, v])
        loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v))
    return mtf.Model(
        loss,
        by_name(optimizer, learning_rate),
        name="transformer_lm",
        layouts={"Mesh-TensorFlow paper": _PAPER[d_ff]} if d_ff in _PAPER else {},
    )


def data(
    batch: int = 16, length: int = 128, vocab: int = 256, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Windows of the standard library's sources, byte by byte; split "held-out" gives files not trained
    on."""
    from examples.text import batches

    return batches(batch, length, vocab, split)


def reference_losses(vocab: int = 256) -> dict[str, float]:
    """What simpler models reach on the same text, in nats per token."""
    from examples.text import unigram_entropy

    return {"unigram entropy": unigram_entropy(vocab)}
