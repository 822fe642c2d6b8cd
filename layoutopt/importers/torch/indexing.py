"""ATen's look-ups at indices, and operations in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import FLAT, CapturedArray, IndexNumbers, Operand, Var, has_fractions
from layoutopt.importers.torch.elementwise import Type, formulas, rule
from layoutopt.importers.torch.emitter import Equations

_COUNTS = ("iota", "sort", "top_k", "argmax", "argmin")
"""Equations whose whole numbers are never below 0."""


formulas(
    {
        "index_select": lambda m, v, x, dim, ids: _index(m, v, x, [*[None] * (dim % len(x.shape)), ids]),
        "logcumsumexp": lambda m, v, x, dim: _logs_of_sums(m, x, dim % len(x.shape)),
        "logaddexp": lambda m, v, x, y: log_of_sum(m, m.expand(x, v.shape), m.expand(y, v.shape)),
        "cumsum": lambda m, v, x, dim, **more: m.unary(
            "cumsum", m.cast(x, v.dtype), axis=dim % len(x.shape), reverse=False
        ),
    }
)


def _logs_of_sums(m: Equations, x: Operand, axis: int) -> Operand:
    """Of all elements up to each, by doubling."""
    size, step = x.shape[axis], 1
    while step < size:
        ins = [m.slice(x, axis, 0, size - step), m.constant(-math.inf, x.dtype)]
        widths = tuple((step * (a == axis), 0, 0) for a in range(len(x.shape)))
        x = log_of_sum(m, x, m.emit("pad", ins, x.shape, x.dtype, padding_config=widths))
        step *= 2
    return x


def log_of_sum(m: Equations, x: Operand, y: Operand) -> Operand:
    """log(exp(x) + exp(y)), whose slopes are halves where both are equal, infinite too."""
    same = m.binary("eq", x, y, x.dtype, "bool")
    apart = m.unary("abs", m.select(same, 0, m.binary("sub", x, y, x.dtype), x.dtype), **{FLAT: True})
    more = m.unary("log1p", m.unary("exp", m.unary("neg", apart)))
    return m.binary("add", m.binary("max", x, y, x.dtype), more, x.dtype)


@rule("embedding")
def _embedding(m: Equations, v: Type, table: Operand, ids: Operand, padding: int = -1, *more: Any) -> Operand:
    found = m.rows(table, ids)
    if padding < 0:
        return found
    # The row of the padding token has a gradient from other readers only, as from a tied output layer.
    pads = m.broadcast(m.binary("eq", ids, padding, ids.dtype, "bool"), found.shape, range(len(ids.shape)))
    return m.select(pads, m.unary("stop_gradient", found), found, found.dtype)


@rule("gather")
def _gather(m: Equations, v: Type, x: Operand, dim: int, ids: Operand, **more: Any) -> Operand:
    dim %= len(x.shape)
    for a, n in enumerate(ids.shape):
        x = x if a == dim else m.slice(x, a, 0, n)
    if (line := one_line(m, ids, dim)) is not None:
        return _taken(m, x, [dim], line.shape, line)
    return moved(m, m.picked(moved(m, x, dim, -1), moved(m, ids, dim, -1)), -1, dim)


def one_line(m: Equations, ids: Operand, dim: int) -> Operand | None:
    """Indices that are the same whatever the places along other axes, as a line; None if they differ."""
    wide, varies = m.maker(ids, "broadcast_in_dim"), {a for a, n in enumerate(ids.shape) if n > 1}
    if wide is not None:
        own = zip(wide.params["broadcast_dimensions"], wide.ins[0].shape, strict=True)
        varies = {a for a, n in own if n > 1}
    if wide is None or not varies <= {dim} or (not varies and ids.shape[dim] > 1):
        return None
    return m.reshape(wide.ins[0], ids.shape[dim : dim + 1])


@rule("diagonal", "diagonal_copy")
def _diagonal(m: Equations, v: Type, x: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Operand:
    """A sum along the second axis, of which all other places are left out: any axis may be split."""
    rank, size = len(x.shape), v.shape[-1]
    ends = [a % rank for a in (dim1, dim2)]
    x = m.transpose(x, [*(a for a in range(rank) if a not in ends), *ends])
    x = m.slice(m.slice(x, rank - 2, max(-offset, 0), size), rank - 1, max(offset, 0), size)
    rows, columns = (m.counted((size, size), a, "int32") for a in range(2))
    own = m.binary("eq", rows, columns, "int32", "bool")
    return m.reduced("reduce_sum", m.select(own, x, 0, x.dtype), [rank - 1])


@rule("index", "_unsafe_index")
def _index(m: Equations, v: Type, x: Operand, ids: Sequence[Operand | None]) -> Operand:
    looked = [a for a, i in enumerate(ids) if i is not None]
    given = [i for i in ids if i is not None]
    if any(i.dtype == "bool" for i in given):
        raise NotImplementedError("it selects by truth values, so its size depends on them")
    if (every := _everywhere(m, x, looked, given)) is not None:
        return every
    if looked != list(range(looked[0], looked[0] + len(looked))):
        x = m.transpose(x, [*looked, *(a for a in range(len(x.shape)) if a not in looked)])
        looked = [*range(len(looked))]
    return _taken(m, x, looked, *indices(m, given, [x.shape[a] for a in looked]))


def counted(m: Equations, ids: Operand) -> tuple[tuple[int, ...], int] | None:
    """The shape and the axis of an array whose places along this axis are indices: of one whose places they
    list, if they have one axis, else of their own, along whose other axes is one element. None: others."""
    of, size, wide = ids, math.prod(ids.shape), [a for a, n in enumerate(ids.shape) if n > 1]
    while (e := m.maker(of, "reshape", "broadcast_in_dim")) and math.prod(e.ins[0].shape) == size:
        of = e.ins[0]
    if (iota := m.maker(of, "iota")) is None or len(ids.shape) == 1:
        return None if iota is None else (of.shape, iota.params["dimension"])
    return (ids.shape, wide[0]) if len(wide) == 1 and of.shape[iota.params["dimension"]] == size else None


def _everywhere(m: Equations, x: Operand, looked: Sequence[int], given: Sequence[Operand]) -> Operand | None:
    """x at all places of an array with its axes, as where a mask is true, or along new axes of one element,
    as a mask of tokens is read for all queries; None if the places are others."""
    found, first, end = [own for i in given if (own := counted(m, i))], looked[0], looked[0] + len(looked)
    if len(found) < len(given) or looked != [*range(first, end)]:
        return None
    listed = all(len(i.shape) == 1 for i in given)
    shape = found[0][0] if listed else np.broadcast_shapes(*(i.shape for i in given))
    alike = all(own == (shape if listed else i.shape) for (own, _), i in zip(found, given, strict=True))
    axes = [len(shape) - len(own) + a for own, a in found]
    if not alike or axes != sorted({*axes}) or [shape[a] for a in axes] != [*x.shape[first:end]]:
        return None
    rest = range(first + len(shape), first + len(shape) + len(x.shape) - end)
    at = (*range(first), *(first + a for a in axes), *rest)
    wide = m.broadcast(x, (*x.shape[:first], *shape, *x.shape[end:]), at)
    return m.reshape(wide, (*x.shape[:first], math.prod(shape), *x.shape[end:])) if listed else wide


def _taken(m: Equations, x: Operand, looked: Sequence[int], shape: Sequence[int], index: Operand) -> Operand:
    """x at indices of a shape along axes that are beside each other."""
    k, first = len(shape), looked[0]
    kept = [a for a in range(len(x.shape)) if a not in looked]
    out = [*x.shape[:first], *shape, *x.shape[first + len(looked) :]]
    offset = [o for o in range(len(out)) if not first <= o < first + k]
    at = IndexNumbers(tuple(offset), tuple(looked), tuple(looked))
    sizes = [x.shape[a] if a in kept else 1 for a in range(len(x.shape))]
    return m.gather(x, index, out, at, sizes)


def indices(m: Equations, given: Sequence[Operand], sizes: Sequence[int]) -> tuple[tuple[int, ...], Operand]:
    """Indices that broadcast: their common shape, and one array with them along its last axis if there are
    several.

    Args:
      sizes: of the axes that they are places of; an index below 0 counts from the end.
    """
    shape = tuple(map(int, np.broadcast_shapes(*(i.shape for i in given))))
    given = [_from_the_end(m, i, n) for i, n in zip(given, sizes, strict=True)]
    if len(given) == 1:
        return shape, given[0]
    parts = [m.reshape(m.expand(m.cast(i, "int32"), shape), (*shape, 1)) for i in given]
    return shape, m.concatenate(parts, len(shape))


def _from_the_end(m: Equations, places: Operand, size: int) -> Operand:
    """Places of which none is below 0."""
    if isinstance(places, CapturedArray):
        known = np.asarray(places.value)
        return m.constant(np.where(known < 0, known + size, known), places.dtype)
    if m.maker(places, *_COUNTS) is not None or counted(m, places) is not None:
        return places
    under = m.binary("lt", places, 0, places.dtype, "bool")
    return m.select(under, m.binary("add", places, size, places.dtype), places, places.dtype)


@rule("one_hot")
def one_hot(m: Equations, v: Type, ids: Operand, classes: int = -1) -> Operand:
    """1 at the place of each index along a new last axis, and 0 at others."""
    place = m.counted(v.shape, len(v.shape) - 1, "int32")
    at = m.broadcast(m.cast(ids, "int32"), v.shape, range(len(ids.shape)))
    return m.cast(m.binary("eq", at, place, "int32", "bool"), v.dtype)


def moved(m: Equations, x: Operand, a: int, b: int) -> Operand:
    """x with axis a in the place b."""
    order = [*range(len(x.shape))]
    order.insert(b % len(order), order.pop(a))
    return m.transpose(x, order)


@rule("topk")
def _topk(
    m: Equations, v: Sequence[Type], x: Operand, k: int, dim: int = -1, largest: bool = True, *more: Any
) -> list[Operand]:
    x = moved(m, x if largest else m.unary("neg", x), dim, -1)
    *lead, _ = x.shape
    outs = [Var((*lead, k), x.dtype), Var((*lead, k), "int32")]
    values, places = m.several("top_k", [x], outs, k=k, axis=len(lead), operand=None)
    return [moved(m, y, -1, dim) for y in (values if largest else m.unary("neg", values), places)]


@rule("sort", "argsort")
def _sort(
    m: Equations, v: Any, x: Operand, dim: int = -1, descending: bool = False, *, stable: Any = None
) -> Any:
    dim %= len(x.shape)
    outs = [Var(x.shape, x.dtype), Var(x.shape, "int32")]
    count, keys = m.counted(x.shape, dim, "int32"), m.unary("neg", x) if descending else x
    values, places = m.several("sort", [keys, count], outs, dimension=dim, is_stable=True, num_keys=1)
    return [m.unary("neg", values) if descending else values, places] if isinstance(v, list) else places


@rule("median")
def _median(m: Equations, v: Any, x: Operand, dim: int = 0, keepdim: bool = False) -> Any:
    """The lower one of the two in the middle."""
    line = x if isinstance(v, list) else m.reshape(x, (math.prod(x.shape),))
    dim %= len(line.shape)
    types = [Type(line.shape, x.dtype), Type(line.shape, "int32")]
    each = [m.slice(y, dim, (line.shape[dim] - 1) // 2, 1) for y in _sort(m, types, line, dim)]
    found = [m.reshape(y, t.shape) for y, t in zip(each, v if isinstance(v, list) else [v], strict=False)]
    return found if isinstance(v, list) else found[0]


@rule("histc")
def _histc(m: Equations, v: Type, x: Operand, bins: int = 100, min: float = 0, max: float = 0) -> Operand:
    if min == max:
        raise NotImplementedError("its bins are between the least and the largest value")
    own = x
    while (made := m.maker(own, "reshape", "convert_element_type")) is not None and has_fractions(own):
        own = made.ins[0]
    whole = not has_fractions(own) and min == 0
    if whole and (max == bins - 1 or (max == bins and _chosen(m, own) <= bins)):
        return _bincount(m, v, x)
    x = m.cast(x, "float32")
    place = m.unary("floor", m.binary("mul", m.binary("sub", x, min, x.dtype), bins / (max - min), x.dtype))
    # The last bin has its upper end, too.
    return _bincount(m, v, m.select(m.binary("eq", x, max, x.dtype, "bool"), bins - 1, place, x.dtype))


def _chosen(m: Equations, x: Operand) -> float:
    """The number of classes of which x has some, such as the experts that a router chose."""
    while (made := m.maker(x, "reshape", "convert_element_type")) is not None:
        x = made.ins[0]
    made = m.maker(x, "top_k", "argmax", "argmin")
    return math.inf if made is None or made.outs[-1] is not x else made.ins[0].shape[-1]


@rule("bincount")
def _bincount(m: Equations, v: Type, x: Operand, weights: Any = None, minlength: int = 0) -> Operand:
    """How often each whole number occurs."""
    if weights is not None:
        raise NotImplementedError("it adds up weights")
    wide = (math.prod(x.shape), *v.shape)
    return m.reduced("reduce_sum", one_hot(m, Type(wide, v.dtype), m.reshape(x, wide[:1])), [0])
