"""ATen's writes at indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import CapturedArray, IndexNumbers, Operand, Var
from layoutopt.importers.torch.elementwise import Type, formulas, rule
from layoutopt.importers.torch.emitter import Equations
from layoutopt.importers.torch.indexing import counted, indices, one_hot, one_line


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
    found = written(m, front, index, rows, n, "scatter_add" if add else "scatter")
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


def written(m: Equations, x: Operand, ids: Operand, rows: Operand, count: int, prim: str) -> Operand:
    """x with rows written ("scatter"), or added ("scatter_add"), at places along its first `count` axes."""
    every = counted(m, ids) if prim == "scatter_add" and count == 1 else None
    if every is not None and every[0][every[1]] == x.shape[0]:
        each = m.reshape(rows, (*every[0], *x.shape[1:]))
        others = [a for a in range(len(every[0])) if a != every[1]]
        return m.binary("add", x, m.reduced("reduce_sum", each, others), x.dtype)
    if count == 1:
        ids = m.reshape(ids, (*ids.shape, 1))
    axes, k = tuple(range(count)), len(ids.shape) - 1
    at = IndexNumbers(tuple(range(k, k + len(x.shape) - count)), axes, axes)
    return _scattered(m, x, ids, rows, at, prim)


def _scattered(m: Equations, x: Operand, ids: Operand, rows: Operand, at: IndexNumbers, prim: str) -> Operand:
    more = {"dimension_numbers": at, "unique_indices": True, "mode": "clip"}
    return m.emit(prim, [x, ids, rows], x.shape, x.dtype, **more)


@rule("scatter")
def _scatter(m: Equations, v: Type, x: Operand, dim: int, ids: Operand, rows: Any, **how: Any) -> Operand:
    if how:
        raise NotImplementedError(f"it has reduce={how.get('reduce')!r}")
    last = dim % len(x.shape) == len(x.shape) - 1
    if (isinstance(rows, Var | CapturedArray) and rows.shape != ()) or not last:
        return _at_places(m, x, dim, ids, m.operand(rows, x.dtype), "scatter")
    # One-hot masks of a router: numbers at places of the last axis.
    hits = one_hot(m, Type((*ids.shape, x.shape[-1]), "bool"), ids)
    hit = m.reduced("reduce_or", hits, [len(ids.shape) - 1])
    return m.select(hit, rows, x, v.dtype)


@rule("scatter_reduce")
def _scatter_reduce(
    m: Equations, v: Type, x: Any, dim: int, ids: Operand, rows: Any, reduce: str, include_self: bool = True
) -> Operand:
    """x with sums, means or extremes of the elements for each place."""
    if reduce not in ("sum", "mean", "amax", "amin"):
        raise NotImplementedError(f"it has reduce={reduce!r}, and only sum, mean, amax and amin are known")
    if reduce == "amin":
        x, rows = m.unary("neg", x), m.unary("neg", rows)
    one = m.full(1, ids.shape, v.dtype)
    count = _at_places(m, m.full(int(include_self), x.shape, v.dtype), dim, ids, one, "scatter_add")
    none, least = m.binary("eq", count, 0, v.dtype, "bool"), -math.inf if reduce in ("amax", "amin") else 0
    begin = x if include_self else m.select(none, x, least, v.dtype)
    if least:
        most = _at_places(m, begin, dim, ids, rows, "scatter_max")
        return m.unary("neg", most) if reduce == "amin" else most
    total = _at_places(m, begin, dim, ids, rows, "scatter_add")
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
    starts = written(m, m.full(0, (count + 1,), "int32"), m.cast(offsets, "int32"), ones, 1, "scatter_add")
    begun = m.unary("cumsum", m.slice(starts, 0, 0, count), axis=0, reverse=False)
    bag = m.binary("sub", begun, 1, "int32")
    found: Operand = written(m, m.full(0, (bags, width), dtype), bag, rows, 1, "scatter_add")
    if mode == 1:
        own = written(m, m.full(0, (bags,), dtype), bag, m.full(1, (count,), dtype), 1, "scatter_add")
        found = m.along("div", found, m.binary("max", own, 1, dtype), [0])
    return [found, None, None, None]


def _at_places(m: Equations, x: Operand, dim: int, ids: Operand, rows: Operand, prim: str) -> Operand:
    """x with an array written, added or compared along an axis, at places that each of its elements has."""
    dim %= len(x.shape)
    others = [a for a in range(len(x.shape)) if a != dim]
    if any(ids.shape[a] != x.shape[a] for a in others):
        raise NotImplementedError("it writes at some places of the other axes")
    rows = m.expand(rows, ids.shape) if rows.shape == () else rows
    rows = m.slice(rows, dim, 0, ids.shape[dim])
    line = one_line(m, ids, dim)
    order = [*others, dim] if line is None else [dim, *others]
    x, rows = m.transpose(x, order), m.transpose(rows, order)
    if line is not None:
        found = written(m, x, line, rows, 1, prim)
    else:
        last, lead = len(others), tuple(range(len(others)))
        at = IndexNumbers((), (last,), (last,), lead, lead)
        index = m.transpose(ids, order)
        found = _scattered(m, x, m.reshape(index, (*index.shape, 1)), rows, at, prim)
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
    numbers = IndexNumbers((2,), (1,), (1,), (0,), (0,))
    found = m.gather(rows, places, v.shape, numbers, (1, 1, v.shape[2]))
    return m.select(m.broadcast(line, v.shape, (0, 1)), found, x, v.dtype)


formulas(
    {
        "scatter_add": lambda m, v, x, dim, ids, rows: _at_places(m, x, dim, ids, rows, "scatter_add"),
        "index_add": lambda m, v, x, dim, ids, rows, alpha=1: _index_put(
            m, v, x, [*[None] * (dim % len(x.shape)), ids], m.binary("mul", rows, alpha, x.dtype), True
        ),
    }
)
