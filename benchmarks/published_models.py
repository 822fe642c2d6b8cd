"""Language models whose layers differ from those of `examples/transformer_lm.py` in what they compute.

A published time is of the program that its authors ran; these build that program.
"""

from __future__ import annotations

from dataclasses import dataclass

import mesh_tf_core as mtf
from mesh_tf_core import layers as nn
from mesh_tf_core.optimizers import by_name


@dataclass(frozen=True)
class Float32Softmax(nn.Attention):
    """Attention whose logits and softmax are float32 whatever the activations are (lingvo's
    `attention_logits_dtype`)."""

    def weights(self, logits: mtf.Tensor, mask: mtf.Tensor | None, memory: str) -> mtf.Tensor:
        return super().weights(logits.cast("float32"), mask, memory).cast(logits.dtype)


def language_model(
    layers: int,
    d_model: int,
    d_kv: int,
    heads: int,
    d_ff: int,
    vocab: int,
    batch: int,
    length: int,
    dtype: str,
    gated: bool = False,
    tied: bool = False,
    kv_heads: int = 0,
    rotary: bool = False,
    optimizer: str = "adam",
    parallel: bool = False,
    float32_softmax: bool = False,
    one_hot: bool = False,
    biases: bool = False,
    activation: str = "",
    attention: str = "plain",
    width: str = "d_model",
    rows: str = "length",
) -> mtf.Model:
    """A decoder without learned positions; other arguments as `examples/transformer_lm.py`.

    Args:
      parallel: attention and feed-forward read the same input and are added, one all-reduce for both (Wang
        and Komatsuzaki 2021, GPT-J).
      float32_softmax: `Float32Softmax`.
      attention: fused, one operation, or plain, written out.
      one_hot: tokens are embedded by a product with ones where they are, not looked up.
      biases: all products of a layer add one.
      activation: of the feed-forward block; else silu if it is gated, relu if not.
      width: name of the features between layers; with one of its own they can be split there although heads
        and d_ff are split over the same axis.
      rows: name of the positions between layers, for the same reason: where they are split over the axis of
        heads and d_ff, this is sequence parallelism (Korthikanti et al. 2022).
    """
    b, s = mtf.Dim("batch", batch), mtf.Dim("length", length)
    d, v = mtf.Dim("d_model", d_model), mtf.Dim("vocab", vocab)
    kind = Float32Softmax if float32_softmax else nn.Attention
    turned = nn.Rotary() if rotary else None
    sizes = mtf.Dim("heads", heads), mtf.Dim("d_kv", d_kv)
    adds = "all" if biases else "none"
    attend = kind(*sizes, kv_heads, causal=True, rotary=turned, attention=attention, biases=adds)
    activation = activation or ("silu" if gated else "relu")
    feed_forward = nn.FeedForward(mtf.Dim("d_ff", d_ff), activation, gated, biases)
    embedding = nn.Embedding(v, d, dtype)

    def between(x: mtf.Tensor) -> mtf.Tensor:
        return _named(_named(x, "d_model", width), "length", rows)

    def normal(x: mtf.Tensor, name: str) -> mtf.Tensor:
        return _named(_named(nn.LayerNorm(width, name=name)(x), width, "d_model"), rows, "length")

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        y = normal(x, "attention_norm")
        if parallel:
            return x + between(attend(y) + feed_forward(y))
        x = x + between(attend(y))
        return x + between(feed_forward(normal(x, "feed_forward_norm")))

    g = mtf.Graph("published_lm")
    tokens, targets = g.input("tokens", [b, s]), g.input("targets", [b, s])
    table = embedding.table(g)
    marks = mtf.one_hot(tokens, v, dtype) if one_hot else None
    embedded = (
        embedding(table, tokens) if marks is None else mtf.einsum([marks, table], [b, s, d], chooses=True)
    )
    x = mtf.scan(layer, between(embedded), mtf.Dim("layers", layers))
    logits = embedding.logits(normal(x, "final_norm"), table if tied else None)
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v))
    return mtf.Model(loss, by_name(optimizer, 0.001), name="published_lm", token_dims=(b, s))


def _named(x: mtf.Tensor, old: str, new: str) -> mtf.Tensor:
    return x if old == new else mtf.rename(x, **{old: new})
