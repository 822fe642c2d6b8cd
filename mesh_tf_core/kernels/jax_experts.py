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
"""Rows and columns of a tile: the first that divides."""


def tiles(dtype: Any, *sizes: int) -> tuple[int, ...] | None:
    """Tiles of rows, summed and made elements; None where these kernels have none."""
    found = tuple(next((t for t in TILES if n % t == 0), 0) for n in sizes)
    return found if all(found) and dtype in (jnp.bfloat16, jnp.float32) else None


def product(x: T, w: T, sizes: T, tiling: tuple[int, ...], interpret: bool = False) -> T:
    """`lax.ragged_dot` of x [rows, summed] and w [experts, summed, made]."""
    return gmm(x, w, sizes, x.dtype, tiling, interpret=interpret)


def outer(x: T, y: T, sizes: T, tiling: tuple[int, ...], interpret: bool = False) -> T:
    """x [rows, summed] times y [rows, made] for each expert: [experts, summed, made]."""
    return tgmm(x.T, y, sizes, x.dtype, tiling, interpret=interpret)
