"""An encoder-decoder Transformer on real text pairs (docstring -> function); its sizes reach every
translation model of the Mesh-TensorFlow paper (Shazeer et al. 2018, section 9.2).

    layoutopt search examples/transformer_seq2seq.py --mesh "data:2;model:4"
    layoutopt train examples/transformer_seq2seq.py --layout auto --mesh "data:2;model:4" --steps 200
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core import layers as nn
from mesh_tf_core.optimizers import by_name

_EXPERT = "batch:batch;vocab:model;d_ff:model;heads:model"
_PAPER = {
    2048: ("batch:32", "batch:batch"),
    4096: ("batch:32", "batch:batch"),
    8192: ("model:4;batch:8", _EXPERT),
    16384: ("model:4;batch:8", _EXPERT),
    32768: ("model:8;batch:16", _EXPERT),
    65536: ("model:8;batch:16", _EXPERT),
}
"""d_ff -> the paper's mesh and layout for this size (tensor2tensor's mtf_transformer_paper_tr)."""


def model(
    layers: int = 2,
    encoder_layers: int = 0,
    decoder_layers: int = 0,
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
    warmup: int = 0,
    dropout: float = 0.0,
) -> mtf.Model:
    """Builds the model. Source and target share the embedding; 0 is padding, and begins the target.

    Args:
      layers: of the encoder and of the decoder; `encoder_layers` and `decoder_layers` (0: as many) set one.
      d_kv: size of one head.
      kv_heads: heads of keys and values (grouped-query attention); 0 means as many as `heads`.
      gated: three feed-forward matrices, silu(x a) * (x b), instead of two with relu.
      positions: learned, relative (biases in buckets, as T5), rotary, none, or the number of learned ones.
      tied: the output projection is the embedding.
      dtype: of activations; variables and their updates are float32.
      warmup: steps up to the learning rate, which then falls with the root of the step; 0: it is constant.
    """
    g = mtf.Graph("transformer_seq2seq")
    text = [mtf.Dim("batch", batch), mtf.Dim("length", length)]
    d, f, v = mtf.Dim("d_model", d_model), mtf.Dim("d_ff", d_ff), mtf.Dim("vocab", vocab)
    h, k = mtf.Dim("heads", heads), mtf.Dim("d_kv", d_kv)
    rotary = nn.Rotary() if positions == "rotary" else None

    def attention(name: str, **fields: object) -> nn.Attention:
        return nn.Attention(h, k, kv_heads, dropout=dropout, name=name, **fields)  # type: ignore[arg-type]

    own, looking_back = (
        attention("attention", rotary=rotary),
        attention("attention", rotary=rotary, causal=True),
    )
    across = attention("cross_attention")
    feed_forward = nn.FeedForward(f, "silu" if gated else "relu", gated, dropout=dropout)
    source, targets = g.input("source", text), g.input("targets", text)
    embedding = nn.Embedding(v, d, dtype)
    table = embedding.table(g)
    learned, where = None, None
    if positions not in ("relative", "rotary", "none"):
        learned = nn.LearnedPositions(length if positions == "learned" else int(positions))
        where = learned.table(g, d, dtype)
    seen = mtf.rename(source > 0, length="memory_length")

    def embedded(ids: mtf.Tensor) -> mtf.Tensor:
        x = embedding(table, ids)
        return mtf.dropout(learned(x, where) if learned else x, dropout)

    def bias(kind: nn.Attention, x: mtf.Tensor) -> mtf.Tensor | None:
        if positions != "relative":
            return None
        return nn.RelativeBias(bidirectional=not kind.causal)(kind.relative(x), kind.head_dims, dtype)

    def plus(x: mtf.Tensor, name: str, layer: object, *more: object, **fields: object) -> mtf.Tensor:
        y = layer(nn.LayerNorm(name=f"{name}_norm")(x), *more, **fields)  # type: ignore[operator]
        return x + mtf.dropout(y, dropout)

    with g.scope("encoder"):
        x = embedded(source)
        near = bias(own, x)

        def encode(x: mtf.Tensor) -> mtf.Tensor:
            x = plus(x, "attention", own, mask=seen, bias=near)
            return plus(x, "feed_forward", feed_forward)

        x = mtf.scan(encode, x, mtf.Dim("encoder_layers", encoder_layers or layers))
        memory = mtf.rename(nn.LayerNorm(name="final_norm")(x), length="memory_length")
    with g.scope("decoder"):
        x = embedded(mtf.shift(targets, 1, "length"))
        before = bias(looking_back, x)

        def decode(x: mtf.Tensor) -> mtf.Tensor:
            x = plus(x, "attention", looking_back, bias=before)
            x = plus(x, "cross_attention", across, memory, mask=seen)
            return plus(x, "feed_forward", feed_forward)

        x = mtf.scan(decode, x, mtf.Dim("decoder_layers", decoder_layers or layers))
        x = nn.LayerNorm(name="final_norm")(x)
    logits = embedding.logits(x, table if tied else None)
    loss = mtf.softmax_cross_entropy(logits, targets, v)
    # The mean over all positions, padding included, so that a batch is the sum of its parts (microbatches).
    loss = mtf.reduce_mean(mtf.where(targets > 0, loss, 0.0))
    rate = mtf.WarmupRsqrt(learning_rate, warmup) if warmup else learning_rate
    return mtf.Model(
        loss,
        by_name(optimizer, rate),
        name="transformer_seq2seq",
        layouts={"Mesh-TensorFlow paper": _PAPER[d_ff]} if d_ff in _PAPER else {},
    )


def data(
    batch: int = 16, length: int = 128, vocab: int = 256, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Docstrings and functions of the standard library, byte by byte; "held-out": files not trained on."""
    from examples.pairs import batches

    return batches(batch, length, vocab, split)
