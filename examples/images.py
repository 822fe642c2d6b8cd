"""Image data from scikit-learn: handwritten digits, and volumes that are made from them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def _check(split: str) -> None:
    if split not in ("train", "held-out"):
        raise ValueError(f"split {split!r}: use 'train' or 'held-out'")


def digits(batch: int, size: int, split: str = "train") -> Iterator[dict[str, np.ndarray]]:
    """image [batch, size, size, 1] in [0, 1], the 8 x 8 digits enlarged, and label [batch]; every fifth digit
    is held out."""
    from sklearn.datasets import load_digits

    _check(split)
    if size % 8:
        raise ValueError(f"size={size} is not supported; give a multiple of 8, the width of the digit images")
    found = load_digits()
    held = np.arange(len(found.target)) % 5 == 4
    chosen = held if split == "held-out" else ~held
    images = (found.images[chosen] / 16).astype(np.float32)
    labels = found.target[chosen].astype(np.int32)
    rng = np.random.default_rng(0)
    while True:
        pick = rng.integers(0, len(labels), batch)
        large = np.kron(images[pick], np.ones((size // 8, size // 8), np.float32))
        yield {"image": large[..., None], "label": labels[pick]}


def solids(batch: int, size: int, split: str = "train") -> Iterator[dict[str, np.ndarray]]:
    """Noisy volumes in which a digit goes through part of the depth, slanted, and which voxels it fills.

    volume [batch, size, size, size, 1] and filled [batch, size, size, size] (0 or 1).
    """
    rng = np.random.default_rng(1)
    for found in digits(batch, size, split):
        faces = found["image"][..., 0]
        shifts = rng.integers(-size // 4, size // 4 + 1, (batch, 2))
        begin = rng.integers(0, size // 2, batch)
        volume = np.zeros((batch, size, size, size), np.float32)
        for i, face in enumerate(faces):
            for depth in range(begin[i], begin[i] + size // 2):
                slant = (depth - begin[i]) / (size // 2)
                volume[i, depth] = np.roll(face, tuple(np.round(shifts[i] * slant).astype(int)), (0, 1))
        noisy = volume + rng.normal(0, 0.3, volume.shape).astype(np.float32)
        yield {"volume": noisy[..., None], "filled": (volume > 0.5).astype(np.int32)}
