"""Whole arrays, and the pieces of them that lie on the devices of a mesh. A piece goes by the index of its
first element."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Stored, Value
from mesh_tf_core.kernels.numpy_kernel import np_dtype

Begin = tuple[int, ...]
"""Index of a piece's first element, per dimension."""
T = TypeVar("T")


def region(begin: Begin, sizes: Sequence[int]) -> tuple[slice, ...]:
    """What part of a whole array a piece is."""
    return tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))


def per_device(v: Value, mesh: Mesh, ranks: Iterable[int], make: Callable[[Begin], T]) -> list[T]:
    """What `make` makes of every device's piece, once for all devices that hold the same."""
    made: dict[Begin, T] = {}
    begins = [v.begin(mesh, rank) for rank in ranks]
    for begin in begins:
        if begin not in made:
            made[begin] = make(begin)
    return [made[begin] for begin in begins]


def joined(v: Value, mesh: Mesh, pieces: Mapping[Begin, Any]) -> Any:
    """The whole array."""
    out, sizes = np.empty(v.shape.sizes, np_dtype(v.dtype)), v.local(mesh).shape.sizes
    for begin, piece in pieces.items():
        out[region(begin, sizes)] = np.asarray(piece)
    return out


def initial(name: str, stored: Stored, begin: Sequence[int], extent: Sequence[int]) -> Any:
    """A piece of a variable's initial value."""
    variable = stored.variable
    made = variable.initializer.piece(name, variable.shape.sizes, begin, extent)
    return np.asarray(made).astype(np_dtype(variable.dtype)).reshape(tuple(extent))
