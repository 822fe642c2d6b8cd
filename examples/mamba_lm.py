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

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn

NEVER = -1e9
"""The logarithm of a factor that is 0."""


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
    g = mtf.Graph("mamba_lm")
    text = [mtf.Dim("batch", batch), mtf.Dim("length", length)]
    d, v = mtf.Dim("d_model", d_model), mtf.Dim("vocab", vocab)
    h, p, n = mtf.Dim("heads", heads), mtf.Dim("d_head", d_head), mtf.Dim("d_state", d_state)
    tokens, targets = g.input("tokens", text), g.input("targets", text)
    embedding = nn.Embedding(v, d, training.dtype)
    table = embedding.table(g)

    def made(x: mtf.Tensor, name: str, dims: tuple[mtf.Dim, ...]) -> mtf.Tensor:
        """A projection of x, convolved over the last positions."""
        y = nn.Dense(dims, ("d_model",), name=name)(x)
        with g.scope(f"{name}_conv"):
            w = g.variable("weight", [tap, *dims], mtf.Normal(taps**-0.5), activation_dtype=x.dtype)
            bias = g.variable("bias", dims, mtf.ZEROS, activation_dtype=x.dtype)
        y = mtf.conv(y, w, [text[1]], [tap], None, pads=[(taps - 1, 0)], groups=dims)
        return mtf.silu(y + bias)

    tap = mtf.Dim("tap", taps)

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        u = nn.RMSNorm(name="norm", epsilon=1e-5)(x)
        gate = nn.Dense((h, p), ("d_model",), name="gate")(u)
        values, b, c = made(u, "x", (h, p)), made(u, "b", (n,)), made(u, "c", (n,))
        dt = nn.Dense((h,), ("d_model",), name="dt")(u).cast("float32")
        dt = mtf.softplus(dt + g.variable("dt_bias", [h], _dt_bias))
        decay = dt * -mtf.exp(g.variable("log_a", [h], _log_a))
        y = scanned(values * dt.cast(x.dtype), decay, b, c, chunk)
        y = y + values * g.variable("skip", [h], mtf.ONES, activation_dtype=x.dtype)
        y = y * mtf.silu(gate)
        scale = g.variable("out_norm", [h, p], mtf.ONES, activation_dtype=x.dtype)
        y = y * mtf.rsqrt(mtf.reduce_mean(mtf.square(y), [h, p]) + 1e-5) * scale
        return x + nn.Dense((d,), ("heads", "d_head"), name="out")(y)

    x = mtf.scan(layer, embedding(table, tokens), mtf.Dim("layers", layers))
    logits = embedding.logits(nn.RMSNorm(name="final_norm", epsilon=1e-5)(x), table)
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, v))
    return training.model(loss, "mamba_lm", text)


def scanned(x: mtf.Tensor, decay: mtf.Tensor, b: mtf.Tensor, c: mtf.Tensor, chunk: int) -> mtf.Tensor:
    """y_t = h_t c_t, with h_t = exp(decay_t) h_(t-1) + x_t b_t, from h = 0 on.

    Args:
      x: [batch, length, heads, d_head]; decay: float32 [batch, length, heads], negative.
      b, c: [batch, length, d_state].
    """
    length = x.dim("length")
    if chunk < 1 or length.size % chunk:
        raise mtf.UserError(f"chunk={chunk} does not divide length={length.size}; give a divisor")
    chunks, place = mtf.Dim("chunks", length.size // chunk), mtf.Dim("place", chunk)

    def cut(t: mtf.Tensor) -> mtf.Tensor:
        return mtf.reshape(t, [t.shape.dims[0], chunks, place, *t.shape.dims[2:]])

    def between(last: mtf.Tensor, first: mtf.Tensor, dim: str, mask: mtf.Tensor) -> mtf.Tensor:
        """exp(last - first) for pairs of elements of `dim` where the mask holds."""
        return mtf.exp(mtf.where(mask, last - mtf.rename(first, **{dim: f"{dim}_from"}), NEVER))

    values, cb, cc = cut(x), cut(b), cut(c)
    batch, heads, d_head, d_state = x.dim("batch"), x.dim("heads"), x.dim("d_head"), b.dim("d_state")
    total = mtf.cumsum(cut(decay), place)  # the logarithm of what is left of the chunk's first state
    to, start = mtf.mtf_range(x.graph, place), mtf.mtf_range(x.graph, mtf.Dim("place_from", chunk))
    kept = between(total, total, "place", to >= start).cast(x.dtype)
    seen = mtf.einsum(
        [cc, mtf.rename(cb, place="place_from")], [batch, chunks, place, start.dim("place_from")]
    )
    y = mtf.einsum([seen * kept, mtf.rename(values, place="place_from")], values.shape)

    whole = mtf.reduce_sum(cut(decay), place)
    left = mtf.exp(whole - total).cast(x.dtype)
    states = mtf.einsum([cb, values * left], [batch, chunks, heads, d_head, d_state])
    done = mtf.cumsum(whole, chunks)
    to, start = mtf.mtf_range(x.graph, chunks), mtf.mtf_range(x.graph, mtf.Dim("chunks_from", chunks.size))
    passed = between(done - whole, done, "chunks", to > start).cast(x.dtype)
    before = mtf.einsum([passed, mtf.rename(states, chunks="chunks_from")], states.shape)
    y = y + mtf.einsum([cc, before], values.shape) * mtf.exp(total).cast(x.dtype)
    return mtf.reshape(y, x.shape)


def _log_a(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.log(rng.uniform(1, 16, shape))


def _dt_bias(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """So that softplus gives steps between 0.001 and 0.1."""
    dt = np.exp(rng.uniform(math.log(0.001), math.log(0.1), shape))
    return dt + np.log(-np.expm1(-dt))


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
