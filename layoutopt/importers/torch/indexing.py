"""ATen's look-ups, writes at indices, and operations in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import (
    CapturedArray,
    GatherNumbers,
    Operand,
    ScatterNumbers,
    Var,
    has_fractions,
)
from layoutopt.importers.torch.elementwise import Type, formulas, rule
from layoutopt.importers.torch.emitter import Equations

_COUNTS = ("iota", "sort", "top_k", "argmax", "argmin")
"""Equations whose whole numbers are never below 0."""


formulas(
    {
        "index_select": lambda m, v, x, dim, ids: _index(m, v, x, [*[None] * (dim % len(x.shape)), ids]),
        "scatter_add": lambda m, v, x, dim, ids, rows: _at_places(m, x, dim, ids, rows, True),
        "index_add": lambda m, v, x, dim, ids, rows, alpha=1: _index_put(
            m, v, x, [*[None] * (dim % len(x.shape)), ids], m.binary("mul", rows, alpha, x.dtype), True
        ),
        "cumsum": lambda m, v, x, dim, **more: m.unary(
            "cumsum", m.cast(x, v.dtype), axis=dim % len(x.shape), reverse=False
        ),
    }
)


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
    if (line := _one_line(m, ids, dim)) is not None:
        return _taken(m, x, [dim], line.shape, line)
    return moved(m, m.picked(moved(m, x, dim, -1), moved(m, ids, dim, -1)), -1, dim)


def _one_line(m: Equations, ids: Operand, dim: int) -> Operand | None:
    """Indices that are the same whatever the places along other axes, as a line; None if they differ."""
    wide, varies = m.maker(ids, "broadcast_in_dim"), {a for a, n in enumerate(ids.shape) if n > 1}
    if wide is not None:
        own = zip(wide.params["broadcast_dimensions"], wide.ins[0].shape, strict=True)
        varies = {a for a, n in own if n > 1}
    if wide is None or not varies <= {dim} or (not varies and ids.shape[dim] > 1):
        return None
    return m.reshape(wide.ins[0], ids.shape[dim : dim + 1])


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


def _counted(m: Equations, ids: Operand) -> tuple[tuple[int, ...], int] | None:
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
    found, first, end = [own for i in given if (own := _counted(m, i))], looked[0], looked[0] + len(looked)
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
    at = GatherNumbers(tuple(offset), tuple(looked), tuple(looked))
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
    if m.maker(places, *_COUNTS) is not None or _counted(m, places) is not None:
        return places
    under = m.binary("lt", places, 0, places.dtype, "bool")
    return m.select(under, m.binary("add", places, size, places.dtype), places, places.dtype)


@rule("index_put")
def _index_put(
    m: Equations, v: Type, x: Operand, ids: Sequence[Operand | None], rows: Operand, add: bool = False
) -> Operand:
    looked = [a for a, i in enumerate(ids) if i is not None]
    given = [i for i in ids if i is not None]
    if len(given) == 1 and given[0].dtype == "bool":
        return _where_true(m, x, looked[0], given[0], rows, add)
    if any(i.dtype == "bool" for i in given):
        raise NotImplementedError("it writes at truth values of some axes and places of others")
    n, order = len(given), [*looked, *(a for a in range(len(x.shape)) if a not in looked)]
    front = m.transpose(x, order)
    shape, index = indices(m, given, front.shape[:n])
    # Indices beside each other keep their place among the other axes, others come first.
    begin = looked[0] if looked == [*range(looked[0], looked[0] + n)] else 0
    end = begin + len(shape)
    rows = m.expand(m.cast(rows, x.dtype), (*front.shape[n : n + begin], *shape, *front.shape[n + begin :]))
    rows = m.transpose(rows, [*range(begin, end), *range(begin), *range(end, len(rows.shape))])
    found = written(m, front, index, rows, n, add)
    return m.transpose(found, [order.index(a) for a in range(len(order))])


def _where_true(m: Equations, x: Operand, begin: int, mask: Operand, rows: Operand, add: bool) -> Operand:
    """x with one number or row at all places where a mask of some of its axes is true."""
    end = begin + len(mask.shape)
    rest = x.shape[end:]
    if len(rows.shape) == len(rest) + 1 and rows.shape[0] == 1:
        rows = m.reshape(rows, rows.shape[1:])
    each = zip(rows.shape[::-1], rest[::-1], strict=False)
    if len(rows.shape) > len(rest) or any(n not in (1, k) for n, k in each):
        raise NotImplementedError("it writes several rows at truth values")
    hit = m.broadcast(mask, x.shape, range(begin, end))
    return m.select(hit, m.binary("add", x, rows, x.dtype) if add else m.cast(rows, x.dtype), x, x.dtype)


def written(m: Equations, x: Operand, ids: Operand, rows: Operand, count: int, add: bool) -> Operand:
    """x with rows written, or added, at places along its first `count` axes."""
    every = _counted(m, ids) if add and count == 1 else None
    if every is not None and every[0][every[1]] == x.shape[0]:
        each = m.reshape(rows, (*every[0], *x.shape[1:]))
        others = [a for a in range(len(every[0])) if a != every[1]]
        return m.binary("add", x, m.reduced("reduce_sum", each, others), x.dtype)
    if count == 1:
        ids = m.reshape(ids, (*ids.shape, 1))
    axes, k = tuple(range(count)), len(ids.shape) - 1
    at = ScatterNumbers(tuple(range(k, k + len(x.shape) - count)), axes, axes)
    return _scattered(m, x, ids, rows, at, add)


def _scattered(
    m: Equations, x: Operand, ids: Operand, rows: Operand, at: ScatterNumbers, add: bool
) -> Operand:
    more = {"dimension_numbers": at, "unique_indices": True, "mode": "clip"}
    return m.emit("scatter_add" if add else "scatter", [x, ids, rows], x.shape, x.dtype, **more)


@rule("scatter")
def _scatter(m: Equations, v: Type, x: Operand, dim: int, ids: Operand, rows: Any, **how: Any) -> Operand:
    if how:
        raise NotImplementedError(f"it has reduce={how.get('reduce')!r}")
    last = dim % len(x.shape) == len(x.shape) - 1
    if (isinstance(rows, Var | CapturedArray) and rows.shape != ()) or not last:
        return _at_places(m, x, dim, ids, m.operand(rows, x.dtype), False)
    # One-hot masks of a router: numbers at places of the last axis.
    hits = _one_hot(m, Type((*ids.shape, x.shape[-1]), "bool"), ids)
    hit = m.reduced("reduce_or", hits, [len(ids.shape) - 1])
    return m.select(hit, rows, x, v.dtype)


@rule("scatter_reduce")
def _scatter_reduce(
    m: Equations,
    v: Type,
    x: Operand,
    dim: int,
    ids: Operand,
    rows: Operand,
    reduce: str,
    include_self: bool = True,
) -> Operand:
    """x with sums or means of the elements for each place."""
    if reduce not in ("sum", "mean"):
        raise NotImplementedError(f"it has reduce={reduce!r}, and only sum and mean are known")
    one = m.full(1, ids.shape, v.dtype)
    count = _at_places(m, m.full(1 if include_self else 0, x.shape, v.dtype), dim, ids, one, True)
    none = m.binary("eq", count, 0, v.dtype, "bool")
    begin = x if include_self else m.select(none, x, 0, v.dtype)
    total = _at_places(m, begin, dim, ids, rows, True)
    return total if reduce == "sum" else m.binary("div", total, m.binary("max", count, 1, v.dtype), v.dtype)


@rule("embedding_bag")
def _embedding_bag(
    m: Equations,
    v: Sequence[Type],
    table: Operand,
    ids: Operand,
    offsets: Operand,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Operand | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> list[Any]:
    """Sums (mode 0), means (1) or extremes (2) of the rows of bags, which begin at offsets."""
    if scale_grad_by_freq or padding_idx not in (None, -1) or include_last_offset:
        raise NotImplementedError("it scales gradients, skips a row, or has an offset for the end")
    bags, width, dtype = *v[0].shape, v[0].dtype
    rows, count = m.rows(table, ids), ids.shape[0]
    if per_sample_weights is not None:
        rows = m.along("mul", rows, per_sample_weights, [0])
    begins = np.asarray(offsets.value) if isinstance(offsets, CapturedArray) else None
    if begins is not None and count % bags == 0 and (begins == np.arange(bags) * (count // bags)).all():
        each = m.reshape(rows, (bags, count // bags, width))
        of_bag = m.reduced("reduce_max" if mode == 2 else "reduce_sum", each, [1])
        return [m.binary("mul", of_bag, bags / count, dtype) if mode == 1 else of_bag, None, None, None]
    if mode == 2:
        raise NotImplementedError("it takes extremes of bags of different sizes")
    ones = m.full(1, (bags,), "int32")
    starts = written(m, m.full(0, (count + 1,), "int32"), m.cast(offsets, "int32"), ones, 1, True)
    begun = m.unary("cumsum", m.slice(starts, 0, 0, count), axis=0, reverse=False)
    bag = m.binary("sub", begun, 1, "int32")
    found: Operand = written(m, m.full(0, (bags, width), dtype), bag, rows, 1, True)
    if mode == 1:
        own = written(m, m.full(0, (bags,), dtype), bag, m.full(1, (count,), dtype), 1, True)
        found = m.along("div", found, m.binary("max", own, 1, dtype), [0])
    return [found, None, None, None]


def _at_places(m: Equations, x: Operand, dim: int, ids: Operand, rows: Operand, add: bool) -> Operand:
    """x with an array written, or added, along an axis, at places that each of its elements has."""
    dim %= len(x.shape)
    others = [a for a in range(len(x.shape)) if a != dim]
    if any(ids.shape[a] != x.shape[a] for a in others):
        raise NotImplementedError("it writes at some places of the other axes")
    rows = m.expand(rows, ids.shape) if rows.shape == () else rows
    rows = m.slice(rows, dim, 0, ids.shape[dim])
    line = _one_line(m, ids, dim)
    order = [*others, dim] if line is None else [dim, *others]
    x, rows = m.transpose(x, order), m.transpose(rows, order)
    if line is not None:
        found = written(m, x, line, rows, 1, add)
    else:
        last, lead = len(others), tuple(range(len(others)))
        at = ScatterNumbers((), (last,), (last,), lead, lead)
        index = m.transpose(ids, order)
        found = _scattered(m, x, m.reshape(index, (*index.shape, 1)), rows, at, add)
    return m.transpose(found, [order.index(a) for a in range(len(order))])


@rule("masked_scatter")
def _masked_scatter(m: Equations, v: Type, x: Operand, mask: Operand, rows: Operand) -> Operand:
    """x with `rows`, in order, where a mask is true: image features at image tokens."""
    wide = m.maker(mask, "broadcast_in_dim")
    batch, count = v.shape[0], math.prod(rows.shape) // v.shape[-1]
    kept = mask.shape[-1] == 1 or (wide is not None and (wide.ins[0].shape[-1] == 1))
    if len(v.shape) != 3 or not kept or rows.shape[-1] != v.shape[-1] or count % batch:
        raise NotImplementedError("its mask is not of whole rows, as many in each example")
    m.notes[f"{m.where}: imported as if each example had as many tokens of images or sounds"] = None
    line = m.reshape(m.slice(mask, 2, 0, 1), v.shape[:2])
    counts = m.unary("cumsum", m.cast(line, "int32"), axis=1, reverse=False)
    places = m.binary("max", m.binary("sub", counts, 1, "int32"), 0, "int32")
    rows = m.reshape(m.cast(rows, v.dtype), (batch, count // batch, v.shape[2]))
    numbers = GatherNumbers((2,), (1,), (1,), (0,), (0,))
    found = m.gather(rows, places, v.shape, numbers, (1, 1, v.shape[2]))
    return m.select(m.broadcast(line, v.shape, (0, 1)), found, x, v.dtype)


@rule("one_hot")
def _one_hot(m: Equations, v: Type, ids: Operand, classes: int = -1) -> Operand:
    place = m.counted(v.shape, len(v.shape) - 1, "int32")
    at = m.broadcast(m.cast(ids, "int32"), v.shape, range(len(ids.shape)))
    return m.cast(m.binary("eq", at, place, "int32", "bool"), v.dtype)


# -- order ---------------------------------------------------------------------------------------------------


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
    return m.reduced("reduce_sum", _one_hot(m, Type(wide, v.dtype), m.reshape(x, wide[:1])), [0])
