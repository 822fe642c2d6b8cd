"""A decoder-only Transformer language model on real text. Its hyperparameters can express every language
model of the Mesh-TensorFlow paper (Shazeer et al. 2018, section 9.1).

    layoutopt search examples/transformer_lm.py --mesh "data:2;model:4"
    layoutopt train examples/transformer_lm.py --layout auto --mesh "data:2;model:4" --steps 200 \\
        --checkpoint build/lm
    layoutopt search examples/transformer_lm.py:llama3_8b --devices 64 --hardware h100
    layoutopt generate examples/transformer_lm.py --checkpoint build/lm --prompt "def main("
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import decoding
from mesh_tf_core import layers as nn

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


_NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


@trained()
def model(
    layers: int = 4,
    d_model: int = 256,
    d_kv: int = 32,
    heads: int = 8,
    kv_heads: int = 0,
    d_ff: int = 1024,
    gated: bool = False,
    activation: str = "",
    vocab: int = 256,
    batch: int = 16,
    length: int = 128,
    positions: str = "learned",
    rotary_base: float = 10000.0,
    norm: str = "layer",
    tied: bool = False,
    dropout: float = 0.0,
    attention: str = "fused",
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model.

    Args:
      d_kv: size of one head.
      kv_heads: heads of keys and values (grouped-query attention); 0 means as many as `heads`.
      gated: three feed-forward matrices, activation(x a) * (x b), instead of two.
      activation: e.g. gelu; by default silu if gated, else relu.
      positions: learned, relative (biases in buckets, as T5), rotary, none, or the number of learned ones.
      rotary_base: the slowest pair of elements turns by 1 / rotary_base per position.
      norm: layer (mean 0 and variance 1) or rms (root mean square 1), with learned scales.
      tied: the output projection is the embedding.
      attention: "fused" (one operation that never stores all logits) or "plain" (products and a softmax).
    """
    b, s = mtf.Dim("batch", batch), mtf.Dim("length", length)
    d, f, v = mtf.Dim("d_model", d_model), mtf.Dim("d_ff", d_ff), mtf.Dim("vocab", vocab)
    rotary = nn.Rotary(rotary_base) if positions == "rotary" else None
    if norm not in _NORMS:
        raise mtf.UserError(f"norm={norm!r}: write {' or '.join(_NORMS)}")
    normed = _NORMS[norm]
    attend = nn.Attention(
        mtf.Dim("heads", heads),
        mtf.Dim("d_kv", d_kv),
        kv_heads,
        causal=True,
        rotary=rotary,
        dropout=dropout,
        attention=attention,
    )
    feed_forward = nn.FeedForward(f, activation or ("silu" if gated else "relu"), gated, dropout=dropout)
    embedding = nn.Embedding(v, d, training.dtype)

    def network(g: mtf.Graph) -> decoding.Logits:
        table = embedding.table(g)

        def logits(tokens: mtf.Tensor, cache: decoding.Cache | None = None) -> mtf.Tensor:
            x, bias = embedding(table, tokens), None
            if positions == "relative":
                relative = attend.relative_at(x, cache)
                bias = nn.RelativeBias(bidirectional=False)(relative, attend.head_dims, training.dtype)
            elif positions not in ("rotary", "none"):
                x = nn.LearnedPositions.named(positions, length, "relative", "rotary", "none")(x, cache=cache)

            def layer(x: mtf.Tensor) -> mtf.Tensor:
                y = attend(normed(name="attention_norm")(x), bias=bias, cache=cache)
                x = x + mtf.dropout(y, dropout)
                y = feed_forward(normed(name="feed_forward_norm")(x))
                return x + mtf.dropout(y, dropout)

            x = decoding.scan_layers(layer, mtf.dropout(x, dropout), mtf.Dim("layers", layers), cache)
            return embedding.logits(normed(name="final_norm")(x), table if tied else None)

        return logits

    g = training.graph("transformer_lm")
    tokens, targets = g.input("tokens", [b, s]), g.input("targets", [b, s])
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(network(g)(tokens), targets, v))
    layouts = {"Mesh-TensorFlow paper": _PAPER[d_ff]} if d_ff in _PAPER else {}
    return training.model(loss, "transformer_lm", (b, s), layouts=layouts, network=network)


llama3_8b = partial(
    model,
    layers=32,
    d_model=4096,
    d_kv=128,
    heads=32,
    kv_heads=8,
    d_ff=14336,
    gated=True,
    vocab=128256,
    positions="rotary",
    rotary_base=500000.0,
    norm="rms",
    batch=128,
    length=8192,
    dtype="bfloat16",
)
"""Llama 3 8B: 8,030,261,248 parameters."""
llama3_70b = partial(
    llama3_8b,
    layers=80,
    d_model=8192,
    heads=64,
    d_ff=28672,
)
"""Llama 3 70B: 70,553,706,496 parameters."""
llama3_405b = partial(
    llama3_8b,
    layers=126,
    d_model=16384,
    heads=128,
    d_ff=53248,
    batch=1024,
)
"""Llama 3.1 405B: 405,853,388,800 parameters."""


def generate(
    beams: int = 0, alpha: float = 0.6, temperature: float = 0.0, top: int = 0, **hparams: Any
) -> mtf.Model:
    """The model that continues texts, from the hyperparameters of `model`: greedily, or as
    `decoding.generate` says."""
    return decoding.generate(model(**{**hparams, "dropout": 0.0}), beams, alpha, temperature, top)


def encode(text: str, vocab: int = 256) -> dict[str, list[int]]:
    """The model's inputs for a prompt."""
    return {"prompts": [byte % vocab for byte in text.encode()]}


def decode(tokens: Sequence[int]) -> str:
    """Tokens as text."""
    return bytes(token % 256 for token in tokens).decode(errors="replace")


def data(
    batch: int = 16, length: int = 128, vocab: int = 256, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields windows of the standard library's source code as bytes; "held-out" yields other files."""
    from examples.text import batches

    return batches(batch, length, vocab, split)


def reference_losses(vocab: int = 256) -> dict[str, float]:
    """Losses of simpler models on the same text, in nats per token."""
    from examples.text import unigram_entropy

    return {"unigram entropy": unigram_entropy(vocab)}
