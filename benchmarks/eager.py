"""A training step run eagerly, operation by operation, against the same function staged into one program.

    python benchmarks/eager.py [--engine lockstep] [--steps N]

Counts CPU seconds of this process, so that other processes do not matter, after two steps that trace and fill
caches. Sizes: `small` is a Transformer whose operations take no time, so that what is left is the price of
running them one by one; `medium` has the sizes of `examples/transformer_lm.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mesh_tf_core as mtf  # noqa: E402

MESH, LAYOUT = "data:2;model:2", "batch:data;heads:model;d_ff:model;vocab:model"


@dataclass(frozen=True)
class Size:
    layers: int
    d_model: int
    heads: int
    d_ff: int
    vocab: int
    batch: int
    length: int


SIZES = {
    "small": Size(layers=2, d_model=32, heads=4, d_ff=64, vocab=64, batch=4, length=16),
    "medium": Size(layers=4, d_model=256, heads=8, d_ff=1024, vocab=256, batch=16, length=128),
}


def training(size: Size) -> Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor]:
    """The step: tokens, targets -> loss."""
    d_model, vocab = mtf.Dim("d_model", size.d_model), mtf.Dim("vocab", size.vocab)
    d_kv = mtf.Dim("d_kv", size.d_model // size.heads)
    attention = mtf.layers.Attention(mtf.Dim("heads", size.heads), d_kv, causal=True)
    feed_forward = mtf.layers.FeedForward(mtf.Dim("d_ff", size.d_ff))
    embedding = mtf.layers.Embedding(vocab, d_model)

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        x = x + attention(mtf.layers.LayerNorm(name="norm_1")(x))
        return x + feed_forward(mtf.layers.LayerNorm(name="norm_2")(x))

    def train(tokens: mtf.Tensor, targets: mtf.Tensor) -> mtf.Tensor:
        table = embedding.table(tokens.graph)
        x = mtf.layers.LearnedPositions(size.length)(embedding(table, tokens))
        x = mtf.scan(layer, x, mtf.Dim("layers", size.layers))
        losses = mtf.softmax_cross_entropy(embedding.logits(x), targets, vocab)
        loss = mtf.reduce_mean(losses)
        mtf.minimize(loss, mtf.Adam(1e-3))
        return loss

    return train


def cpu_seconds() -> float:
    now = os.times()
    return now.user + now.system


def measure(size: Size, way: str, engine: str, steps: int) -> tuple[float, float, float]:
    """CPU seconds and seconds per step, and the last loss."""
    run = mtf.Eager(MESH, LAYOUT, engine)
    step: Any = run.staged(training(size)) if way == "staged" else training(size)
    dims = [mtf.Dim("batch", size.batch), mtf.Dim("length", size.length)]
    text = np.random.default_rng(0).integers(0, size.vocab, (2, size.batch, size.length), np.int32)

    def one() -> float:
        with run.step(unroll=way == "eager") as g:
            loss = step(g.constant(text[0], dims), g.constant(text[1], dims))
        return float(loss)

    one(), one()
    cpu, clock = cpu_seconds(), time.perf_counter()
    for _ in range(steps):
        last = one()
    return (cpu_seconds() - cpu) / steps, (time.perf_counter() - clock) / steps, last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="local", choices=("local", "lockstep"))
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    print(f"mesh {MESH}, layout {LAYOUT}, engine {args.engine}")
    print(f"{'model':8}{'way':24}{'CPU s/step':>12}{'s/step':>10}{'of staged':>12}{'loss':>12}")
    for name, size in SIZES.items():
        staged = 0.0
        for way in ("staged", "eager", "eager, loops whole"):
            cpu, clock, loss = measure(size, way, args.engine, args.steps)
            staged = staged or cpu
            print(f"{name:8}{way:24}{cpu:12.4f}{clock:10.4f}{cpu / staged:11.1f}x{loss:12.6f}")


if __name__ == "__main__":
    main()
