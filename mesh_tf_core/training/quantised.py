"""Arrays in few bits, for slow links: whole numbers of 8 or 4 bits, and a scale for every block of elements.

    scale = max |x| / L        code = round(x / scale) in [-L, L],  L = 2^(bits - 1) - 1

What rounding loses is no larger than half a scale. Who sends more later adds it to that (error feedback:
Seide et al. 2014, "1-bit SGD"; Karimireddy et al. 2019), so that nothing is lost in the long run.
"""

from __future__ import annotations

import numpy as np

WHOLE = 32
"""Bits of what is not rounded."""
BITS = (WHOLE, 8, 4)
BLOCK = 256
"""Elements that share a scale, of the array as it lies in memory."""


def quantised(array: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, uint8 [elements * bits / 8, rounded up], and their scales, float32 [blocks]."""
    flat = np.asarray(array, np.float32).ravel()
    blocks = np.zeros((-(-flat.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: flat.size] = flat
    largest = 2 ** (bits - 1) - 1
    scales = np.abs(blocks).max(axis=1, initial=0.0) / np.float32(largest)
    steps = np.where(scales > 0, scales, 1)[:, None]
    whole = np.clip(np.rint(blocks / steps), -largest, largest).astype(np.int8).reshape(-1)[: flat.size]
    codes: np.ndarray = whole.view(np.uint8)
    if bits == 4:
        even = np.zeros(-(-flat.size // 2) * 2, np.uint8)
        even[: flat.size] = codes & 15
        codes = even[::2] | even[1::2] << 4
    return codes, scales


def restored(codes: np.ndarray, scales: np.ndarray, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """The array of its codes, float32."""
    size = int(np.prod(shape, dtype=np.int64))
    whole: np.ndarray = codes.view(np.int8)
    if bits == 4:
        pairs = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1).astype(np.int8)
        whole = np.where(pairs > 7, pairs - 16, pairs)
    return (whole[:size] * np.repeat(scales, BLOCK)[:size]).astype(np.float32).reshape(shape)
