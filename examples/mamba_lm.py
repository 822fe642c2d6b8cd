"""A language model without attention: Mamba-2's selective state spaces (Dao & Gu 2024, "Transformers are
SSMs", sections 6 and 7), on real text.

    layoutopt search examples/mamba_lm.py:mamba2_130m --devices 8 --hardware h100
    layoutopt train examples/mamba_lm.py --layout auto --mesh "data:2;model:2" --steps 200

A head with the state h [d_head, d_state] computes, step by step,

  h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t      y_t = h_t C_t + D x_t

where dt, B and C depend on the token. The computation is split into chunks: matrix products within a chunk,
as in attention, and one state between chunks. A layout may split `heads` (tensor parallelism) and `chunks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn


@trained(learning_rate=0.002)
def model(
    layers: int = 4,
    d_model: int = 128,
    heads: int = 8,
    d_head: int = 32,
    d_state: int = 32,
    taps: int = 4,
    chunk: int = 32,
    vocab: int = 256,
    batch: int = 16,
    length: int = 128,
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model; the output projection is the embedding.

    Args:
      heads, d_head, d_state: of the states; heads times d_head are usually twice d_model.
      taps: of the short convolution before it.
      chunk: positions that are computed together, a divisor of the length.
    """
    g = training.graph("mamba_lm")
    text = [mtf.Dim("batch", batch), mtf.Dim("length", length)]
    d, v = mtf.Dim("d_model", d_model), mtf.Dim("vocab", vocab)
    h, p, n = mtf.Dim("heads", heads), mtf.Dim("d_head", d_head), mtf.Dim("d_state", d_state)
    tokens, targets = g.input("tokens", text), g.input("targets", text)
    embedding = nn.Embedding(v, d, training.dtype)
    table = embedding.table(g)

    mamba = nn.Mamba2(h, p, n, taps=taps, chunk=chunk)

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        return x + mamba(nn.RMSNorm(name="norm", epsilon=1e-5)(x))

    x = mtf.scan(layer, embedding(table, tokens), mtf.Dim("layers", layers))
    logits = embedding.logits(nn.RMSNorm(name="final_norm", epsilon=1e-5)(x), table)
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v))
    return training.model(loss, "mamba_lm", text)


mamba2_130m = partial(
    model,
    layers=24,
    d_model=768,
    heads=24,
    d_head=64,
    d_state=128,
    chunk=256,
    vocab=50288,
    batch=64,
    length=2048,
    dtype="bfloat16",
)
"""Mamba-2 130M: 128,989,632 parameters."""


def data(
    batch: int = 16, length: int = 128, vocab: int = 256, split: str = "train", **_: Any
) -> Iterator[dict[str, np.ndarray]]:
    """Yields windows of the standard library's source code as bytes; "held-out" yields other files."""
    from examples.text import batches

    return batches(batch, length, vocab, split)
