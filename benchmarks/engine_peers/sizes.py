"""The language model that every peer trains, and the two places where a mesh splits it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

EPSILON = 1e-6
RATE = 0.001


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 2
    batch: int = 16
    length: int = 128
    d_model: int = 256
    heads: int = 8
    d_kv: int = 32
    d_ff: int = 1024
    vocab: int = 8192


MESHES = {
    "one": {"data": 1, "model": 1},
    "data": {"data": 8, "model": 1},
    "model": {"data": 1, "model": 8},
    "2x4": {"data": 2, "model": 4},
}
RULES = {"batch": "data", "vocab": "model", "heads": "model", "d_ff": "model"}


def shapes(s: Sizes) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], float]]:
    """Name -> dimension names, sizes, standard deviation at the start (0 means ones)."""
    size = dataclasses.asdict(s)
    table = {
        "tokens": ("vocab d_model", 0.02),
        "positions": ("length d_model", 0.02),
        "projection": ("d_model vocab", s.d_model**-0.5),
        "final_norm": ("d_model", 0.0),
        "norm1": ("layers d_model", 0.0),
        "norm2": ("layers d_model", 0.0),
        "q": ("layers d_model heads d_kv", s.d_model**-0.5),
        "k": ("layers d_model heads d_kv", s.d_model**-0.5),
        "v": ("layers d_model heads d_kv", s.d_model**-0.5),
        "o": ("layers heads d_kv d_model", (s.heads * s.d_kv) ** -0.5),
        "wi": ("layers d_model d_ff", s.d_model**-0.5),
        "wo": ("layers d_ff d_model", s.d_ff**-0.5),
    }
    return {n: (tuple(d.split()), tuple(size[x] for x in d.split()), std) for n, (d, std) in table.items()}


def parameters(s: Sizes) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        name: (rng.normal(0, std, size) if std else np.ones(size)).astype(np.float32)
        for name, (_, size, std) in shapes(s).items()
    }


def batch(s: Sizes) -> tuple[Any, Any]:
    """Tokens and targets, int32 [batch length]."""
    tokens = np.random.default_rng(1).integers(0, s.vocab, (s.batch, s.length)).astype(np.int32)
    return tokens, np.roll(tokens, -1, 1)
