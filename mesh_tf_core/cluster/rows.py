"""Which rows of a batch a process feeds: those that its devices read under the layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mesh_tf_core.ir.program import Program


def rows_of(program: Program, batch: str, ranks: Iterable[int]) -> Any:
    """Rows along the dimension `batch` that devices read of a program's inputs, int64 [n], ascending.

    In a program with microbatches, the inputs hold the batch in parts, one after the other.
    """
    mesh, ranks = program.mesh, tuple(ranks)
    held = np.zeros(0, bool)
    for id in program.feeds.values():
        v = program.values[id]
        n = v.shape.index(batch) + 1
        sizes = v.local(mesh).shape.sizes[:n]
        read = np.zeros(v.shape.sizes[:n], bool)
        for rank in ranks:
            begins = [mesh.group_index(rank, axes) * s for axes, s in zip(v.splits, sizes, strict=False)]
            read[tuple(slice(b, b + s) for b, s in zip(begins, sizes, strict=True))] = True
        held = read.reshape(-1) | (held if held.size else False)
    return np.flatnonzero(held)


def widened(array: Any, rows: Any, size: int) -> Any:
    """An array of `size` rows that holds `array` as the given ones; the others hold anything, and take no
    memory if they are many."""
    whole = np.empty((size, *array.shape[1:]), array.dtype)
    whole[rows] = array
    return whole
