"""The small language model that benchmarks train here: the example's, on the standard library's sources."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

import mesh_tf_core as mtf
from examples.text import batches
from examples.transformer_lm import model as transformer
from mesh_tf_core.optimizers import Schedule

BATCH, LENGTH, VOCAB, HEAD = 16, 64, 128, 16
"""Sequences of a step, their bytes, how many different ones, and the size of a head."""


def build(
    heads: int,
    layers: int,
    batch: int = BATCH,
    length: int = LENGTH,
    rate: float | Schedule = 5e-3,
) -> mtf.Model:
    """A size of it, for `batch` sequences; a rate that is a number rises for 64 steps and then falls with the
    root of the step."""
    width = HEAD * heads
    return transformer(
        layers=layers,
        heads=heads,
        d_kv=HEAD,
        d_model=width,
        d_ff=4 * width,
        vocab=VOCAB,
        batch=batch,
        length=length,
        learning_rate=rate,
        warmup=64,
        clip_norm=1.0,
    )


def training(batch: int = BATCH, seed: int = 0, length: int = LENGTH) -> Iterator[dict[str, np.ndarray]]:
    """Windows in an order of their own."""
    return batches(batch, length, VOCAB, seed=seed)


def held_out(count: int, batch: int = BATCH) -> list[dict[str, np.ndarray]]:
    """The first batches of files that nobody trains on."""
    return [*islice(batches(batch, LENGTH, VOCAB, "held-out"), count)]
