"""Keys and values of a text that grows: all positions so far, or as many as a window sees, in a ring.

In a ring of n places, position p is stored at place p mod n and replaces position p - n, which the window no
longer sees.
"""

from __future__ import annotations

from typing import TypeGuard

from mesh_tf_core.decoding.cache import Cache
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.tensor import Builder, Tensor
from mesh_tf_core.ops.index import dynamic_update, gather, mtf_range
from mesh_tf_core.ops.math import mod
from mesh_tf_core.ops.shape import rename, transpose


class AtPosition(Cache):
    """A cache that is at a position."""

    position: Tensor


def one_of_all(cache: Cache | None) -> TypeGuard[AtPosition]:
    """True if a layer is given one position, not all."""
    return cache is not None and cache.position is not None


def last_positions(t: Tensor, dim: str, count: int, cache: Cache) -> Tensor:
    """Keys or values of the `count` positions before the first that is decoded, where a ring has them; zeros
    for positions before 0."""
    size = t.dim(dim).size
    if count == size:
        return t
    ring = Dim(f"{dim}_ring", count)
    last = cache.start - 1
    positions = last - mod(last - mtf_range(t.graph, ring), count)
    found = rename(gather(t, positions, dim), **{ring.name: dim})
    return transpose(found, Shape(Dim(dim, count) if d.name == dim else d for d in t.shape))


def keys_at(g: Builder, places: Dim, cache: AtPosition) -> Tensor:
    """int32 [places]: the position of the key at every place, minus the one that is decoded."""
    behind = cache.position - mtf_range(g, places)
    return -(mod(behind, places.size) if places.size < cache.length else behind)


def remembered(
    g: Builder, cache: Cache, k: Tensor | None = None, v: Tensor | None = None, dim: str = ""
) -> tuple[Tensor, Tensor]:
    """The keys and values of a cache, after those of its position, if given, were written into it."""
    keys = _written(g, cache, "keys", k, dim)
    if g.path("values") not in cache.states:
        return keys, keys
    return keys, _written(g, cache, "values", v, dim)


def _written(g: Builder, cache: Cache, name: str, new: Tensor | None, dim: str) -> Tensor:
    held = cache.get(g, name)
    if new is None or cache.position is None:
        return held
    held = dynamic_update(held, new, mod(cache.position, held.dim(dim).size), dim)
    cache.put(name, held)
    return held
