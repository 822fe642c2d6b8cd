"""An encoder-decoder Transformer on real text pairs (docstring -> function). Its hyperparameters can express
every translation model of the Mesh-TensorFlow paper (Shazeer et al. 2018, section 9.2).

    layoutopt search examples/transformer_seq2seq.py --mesh "data:2;model:4"
    layoutopt train examples/transformer_seq2seq.py --layout auto --mesh "data:2;model:4" --steps 200 \\
        --checkpoint build/seq2seq
    layoutopt generate examples/transformer_seq2seq.py --checkpoint build/seq2seq --prompt "Return the sum."
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import decoding
from mesh_tf_core import layers as nn

Cached = decoding.Cache | None
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


@trained()
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
    dropout: float = 0.0,
    attention: str = "fused",
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model. Source and target share the embedding; 0 is padding, and begins the target.

    Args:
      layers: of the encoder and of the decoder; `encoder_layers` and `decoder_layers` (0: as many) set one.
      d_kv: size of one head.
      kv_heads: heads of keys and values (grouped-query attention); 0 means as many as `heads`.
      gated: three feed-forward matrices, silu(x a) * (x b), instead of two with relu.
      positions: learned, relative (biases in buckets, as T5), rotary, none, or the number of learned ones.
      tied: the output projection is the embedding.
      attention: "fused" (one operation that never stores all logits) or "plain" (products and a softmax).
    """
    text = [mtf.Dim("batch", batch), mtf.Dim("length", length)]
    d, f, v = mtf.Dim("d_model", d_model), mtf.Dim("d_ff", d_ff), mtf.Dim("vocab", vocab)
    h, k = mtf.Dim("heads", heads), mtf.Dim("d_kv", d_kv)
    rotary = nn.Rotary() if positions == "rotary" else None

    def attending(name: str, **fields: Any) -> nn.Attention:
        return nn.Attention(h, k, kv_heads, dropout=dropout, attention=attention, name=name, **fields)

    own = attending("attention", rotary=rotary)
    looking_back = attending("attention", rotary=rotary, causal=True)
    across = attending("cross_attention")
    feed_forward = nn.FeedForward(f, "silu" if gated else "relu", gated, dropout=dropout)
    embedding = nn.Embedding(v, d, training.dtype)

    def plus(x: mtf.Tensor, name: str, layer: Any, *more: object, **fields: object) -> mtf.Tensor:
        y = layer(nn.LayerNorm(name=f"{name}_norm")(x), *more, **fields)
        return x + mtf.dropout(y, dropout)

    def network(g: mtf.Graph) -> decoding.Logits:
        source, table = g.input("source", text), embedding.table(g)
        seen = mtf.rename(source > 0, length="memory_length")
        learned, where = None, None
        if positions not in ("relative", "rotary", "none"):
            learned = nn.LearnedPositions.named(positions, length, "relative", "rotary", "none")
            where = learned.table(g, d, training.dtype)

        def embedded(ids: mtf.Tensor, cache: Cached = None) -> mtf.Tensor:
            x = embedding(table, ids)
            return mtf.dropout(learned(x, where, cache) if learned else x, dropout)

        def bias(kind: nn.Attention, x: mtf.Tensor, cache: Cached = None) -> mtf.Tensor | None:
            if positions != "relative":
                return None
            relative = kind.relative_at(x, cache)
            return nn.RelativeBias(bidirectional=not kind.causal)(relative, kind.head_dims, training.dtype)

        with g.scope("encoder"):
            x = embedded(source)
            near = bias(own, x)

            def encode(x: mtf.Tensor) -> mtf.Tensor:
                x = plus(x, "attention", own, mask=seen, bias=near)
                return plus(x, "feed_forward", feed_forward)

            x = mtf.scan(encode, x, mtf.Dim("encoder_layers", encoder_layers or layers))
            memory = mtf.rename(nn.LayerNorm(name="final_norm")(x), length="memory_length")

        def logits(before: mtf.Tensor, cache: Cached = None) -> mtf.Tensor:
            with g.scope("decoder"):
                x = embedded(before, cache)
                back = bias(looking_back, x, cache)

                def decode(x: mtf.Tensor) -> mtf.Tensor:
                    x = plus(x, "attention", looking_back, bias=back, cache=cache)
                    x = plus(x, "cross_attention", across, memory, mask=seen, cache=cache)
                    return plus(x, "feed_forward", feed_forward)

                stack = mtf.Dim("decoder_layers", decoder_layers or layers)
                x = nn.LayerNorm(name="final_norm")(decoding.scan_layers(decode, x, stack, cache))
            return embedding.logits(x, table if tied else None)

        return logits

    g = training.graph("transformer_seq2seq")
    logits, targets = network(g), g.input("targets", text)
    before = mtf.shift(targets, 1, "length")
    loss = mtf.softmax_cross_entropy(logits(before), targets, v)
    # Of the target and the 0 that ends it; the mean is over all positions, padding included, so that a batch
    # is the sum of its parts (microbatches).
    loss = mtf.reduce_mean(mtf.where(targets + before > 0, loss, 0.0))
    return training.model(
        loss,
        "transformer_seq2seq",
        text,
        layouts={"Mesh-TensorFlow paper": _PAPER[d_ff]} if d_ff in _PAPER else {},
        network=network,
    )


def generate(
    beams: int = 4, alpha: float = 0.6, temperature: float = 0.0, top: int = 0, **hparams: Any
) -> mtf.Model:
    """The model that writes targets of sources, from the hyperparameters of `model`: by beam search, or as
    `decoding.generate` says."""
    built = model(**{**hparams, "dropout": 0.0})
    return decoding.generate(built, beams, alpha, temperature, top, begin=0, end=0)


def encode(text: str, vocab: int = 256) -> dict[str, list[int]]:
    """The model's inputs for a source text."""
    return {"source": [byte % (vocab - 1) + 1 for byte in text.encode()]}


def decode(tokens: Sequence[int]) -> str:
    """Tokens as text, up to the 0 that ends it."""
    tokens = list(tokens)
    text = tokens[: tokens.index(0)] if 0 in tokens else tokens
    return bytes(token - 1 for token in text).decode(errors="replace")


def data(
    batch: int = 16, length: int = 128, vocab: int = 256, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields docstrings and functions of the standard library as bytes; "held-out" yields other files."""
    from examples.pairs import batches

    return batches(batch, length, vocab, split)
