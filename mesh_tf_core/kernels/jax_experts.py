"""Products of rows with the matrices of their experts by Pallas's megablox kernels on TPUs, where XLA itself
multiplies every row by all of a device's matrices.

Rows lie in the order of their experts; those behind the last group are not written.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

T = Any
TILES = (512, 256, 128)
"""Rows and columns of a tile: the first that divides, else the last, with zeros to fill it."""


def tiles(dtype: Any, *sizes: int) -> tuple[int, ...] | None:
    """Tiles of rows, summed and made elements; None where these kernels have no such type."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return None
    return tuple(next((t for t in TILES if n % t == 0), TILES[-1]) for n in sizes)


def product(x: T, w: T, sizes: T, tiling: tuple[int, ...], interpret: bool = False) -> T:
    """`lax.ragged_dot` of x [rows, summed] and w [experts, summed, made]."""
    rows, summed, made = tiling
    found = gmm(
        _filled(x, rows, summed), _filled(w, 1, summed, made), sizes, x.dtype, tiling, interpret=interpret
    )
    return found[: len(x), : w.shape[2]]


def outer(x: T, y: T, sizes: T, tiling: tuple[int, ...], interpret: bool = False) -> T:
    """x [rows, summed] times y [rows, made] for each expert: [experts, summed, made]."""
    rows, summed, made = tiling
    found = tgmm(
        _filled(x, rows, summed).T, _filled(y, rows, made), sizes, x.dtype, tiling, interpret=interpret
    )
    return found[:, : x.shape[1], : y.shape[1]]


def _filled(x: T, *tiling: int) -> T:
    return jnp.pad(x, [(0, -n % tile) for n, tile in zip(x.shape, tiling, strict=True)])
