"""Text data: the source code of Python's standard library, as bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np


@cache
def corpus(split: str, limit: int = 6_000_000) -> np.ndarray:
    """Byte ids of the standard library's .py files; every tenth file is held out from training.

    Args:
      split: "train" or "held-out".
    """
    if split not in ("train", "held-out"):
        raise ValueError(f"split {split!r}: use 'train' or 'held-out'")
    files = []
    for folder, inside, names in os.walk(Path(os.__file__).parent):
        inside[:] = [
            name for name in inside if name not in ("site-packages", "test")
        ]  # large, and not walked
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    chosen = [p for i, p in enumerate(sorted(files)) if (i % 10 == 9) == (split == "held-out")]
    data = bytearray()
    for path in chosen:
        data += path.read_bytes()
        if len(data) >= limit:
            break
    return np.frombuffer(bytes(data[:limit]), np.uint8).astype(np.int32)


def batches(
    batch: int, length: int, vocab: int, split: str = "train", seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Random windows: tokens [batch length] and targets, the tokens one place later. Bytes are folded into
    `vocab`."""
    return Windows(corpus(split), batch, length, vocab, seed)


class Windows(Iterator[dict[str, np.ndarray]]):
    """The iterator that `batches` returns. It can save and restore its position for resumed runs."""

    def __init__(self, text: np.ndarray, batch: int, length: int, vocab: int, seed: int) -> None:
        self.text, self.batch, self.length, self.vocab = text, batch, length, vocab
        self.rng = np.random.default_rng([seed, len(text)])

    def __next__(self) -> dict[str, np.ndarray]:
        begin = self.rng.integers(0, len(self.text) - self.length - 1, self.batch)
        window = np.stack([self.text[b : b + self.length + 1] for b in begin]) % self.vocab
        return {"tokens": window[:, :-1], "targets": window[:, 1:]}

    def get_state(self) -> dict[str, object]:
        """The state of the random generator."""
        return dict(self.rng.bit_generator.state)

    def set_state(self, state: dict[str, object]) -> None:
        """Restores a state from `get_state`."""
        self.rng.bit_generator.state = state


def unigram_entropy(vocab: int = 256) -> float:
    """Entropy in nats of single bytes of the training text: what a model without context can reach at
    best."""
    counts = np.bincount(corpus("train") % vocab, minlength=vocab).astype(float)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
