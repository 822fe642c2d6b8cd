"""Attention block by block in array functions that every library has: see `attention` for the mathematics.

Rows are cut into blocks whose logits, with all keys, have at most `MOST` elements if possible. The shared
dimensions are cut first (batch, heads), and then the queries, where gradients of keys and values must be
added up. A block sees all of its keys, so that its softmax needs no second look. It holds up to five arrays
as large as its logits: the workspace is 20 MOST bytes, whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.kernel import Attending, Kernel
from mesh_tf_core.ops.kinds import dtype_name
from mesh_tf_core.ops.random import uniform

MOST = 1 << 22
"""Logits of a block."""
_LEAST, HIDDEN = -1e30, -2e30
"""The least logit of a bias, and the logit of a hidden key. The second is always less, so that a row uses
hidden keys only if it sees no others; then it weighs them equally."""
NOTHING_SEEN = (_LEAST + HIDDEN) / 2
"""The log-sum-exp of a row that sees no key is less than this, of all others more."""


def _sizes(x: Any) -> list[int]:
    return list(x.shape)


def _wide(a: Attending) -> str:
    """The dtype of logits, weights and sums."""
    return "float64" if dtype_name(a.query) == "float64" else "float32"


def _cuts(a: Attending) -> list[tuple[int, int]]:
    """Along which axes rows are cut, and into how many parts."""
    sizes = _sizes(a.query)[:-1]
    left, cuts = math.prod(sizes) * a.key.shape[-2], []
    for axis in (*range(a.shared), len(sizes) - 1):
        if left > MOST:
            n = next((n for n in divisors(sizes[axis]) if left <= n * MOST), sizes[axis])
            left //= n
            cuts.append((axis, n))
    return [(axis, n) for axis, n in cuts if n > 1]


def _part(k: Kernel, x: Any, axis: int, number: Any, count: int) -> Any:
    """One of equal parts along an axis; x itself where that is 1 (it is repeated)."""
    sizes = _sizes(x)
    if count == 1 or sizes[axis] == 1:
        return x
    sizes[axis] //= count
    begin: list[Any] = [0] * len(sizes)
    begin[axis] = number * sizes[axis]
    return k.slice(x, begin, sizes)


def _rows(k: Kernel, a: Attending, axis: int, number: Any, count: int) -> Attending:
    """The part of the operands that one of equal parts of the rows along an axis needs."""
    if count == 1:
        return a
    n = len(a.query.shape) - 1

    def part(x: Any) -> Any:
        return None if x is None else _part(k, x, axis, number, count)

    size = a.query.shape[axis] // count
    return replace(
        a,
        query=part(a.query),
        key=part(a.key) if axis < a.shared else a.key,
        value=part(a.value) if axis < a.shared else a.value,
        first=a.first + number * size if axis == n - 1 else a.first,
        bias=part(a.bias),
        mask=part(a.mask),
        segments=a.segments and tuple(map(part, a.segments)),
        noise=a.noise and (*map(part, a.noise[:2]), *a.noise[2:]),
    )


BlockFunction = Callable[[Attending, Sequence[Any]], tuple[list[Any], list[Any]]]
"""(operands, other arrays with rows) -> (arrays to add up over blocks of queries, arrays with rows)."""


def _blocks(
    k: Kernel,
    a: Attending,
    others: Sequence[Any],
    block: BlockFunction,
    totals: Callable[[Attending], list[list[int]]],
) -> tuple[list[Any], list[Any]]:
    """What `block` gives for all rows: sums over the queries, and rows.

    Args:
      others: what else has rows.
      totals: the shapes of the sums of a block.
    """
    last = len(a.query.shape) - 2

    def run(part: Attending, rest: Sequence[Any], cuts: list[tuple[int, int]]) -> tuple[list[Any], list[Any]]:
        if not cuts:
            return block(part, rest)
        (axis, n), *inner = cuts

        def step(i: Any, totalled: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            inputs = [_part(k, x, axis, i, n) for x in rest]
            sums, rows = run(_rows(k, part, axis, i, n), inputs, inner)
            if axis < last:
                return [], [*sums, *rows]
            return [k.binary("add", t, s) for t, s in zip(totalled, sums, strict=True)], rows

        shapes = totals(part)
        zeros = [k.full(shape, 0.0, _wide(a)) for shape in shapes] if axis == last else []
        sums, made = k.loop(n, step, zeros)
        whole = [_joined(k, x, axis) for x in made]
        return (sums, whole) if axis == last else (whole[: len(shapes)], whole[len(shapes) :])

    return run(a, others, _cuts(a))


def _joined(k: Kernel, x: Any, axis: int) -> Any:
    """Parts, stacked along a new first axis, as one along `axis`."""
    order = [*range(1, axis + 1), 0, *range(axis + 1, len(x.shape))]
    sizes = _sizes(x)[1:]
    sizes[axis] *= x.shape[0]
    return k.reshape(k.transpose(x, order) if axis else x, sizes)


# -- one block -----------------------------------------------------------------------------------------------


def _product(k: Kernel, a: Attending, spec: str, x: Any, y: Any) -> Any:
    """An einsum of [*shared, .., last] arrays as [shared, others, last], in the wide dtype: what shares a key
    are rows of one product."""
    flat = []
    for t in (x, y):
        shared, others = (math.prod(part) for part in (_sizes(t)[: a.shared], _sizes(t)[a.shared : -1]))
        flat.append(k.reshape(k.cast(t, _wide(a)), [shared, others, t.shape[-1]]))
    return k.einsum(spec, *flat)


def _shaped(k: Kernel, a: Attending, x: Any, last: int) -> Any:
    """A product's rows as [*shared, *group, queries, last]."""
    return k.reshape(x, [*_sizes(a.query)[:-1], last])


def _logits(k: Kernel, a: Attending) -> Any:
    wide, keys = _wide(a), _sizes(a.key)[-2]
    q = k.binary("mul", k.cast(a.query, wide), k.scalar(a.scale, wide))
    s = _shaped(k, a, _product(k, a, "bnd,bmd->bnm", q, a.key), keys)
    seen = _seen(k, a)
    if a.bias is not None:
        s = k.binary("add", s, k.cast(a.bias, wide))
        s = s if seen is None else k.binary("max", s, k.scalar(_LEAST, wide))
    return s if seen is None else k.where(seen, s, k.scalar(HIDDEN, wide))


def _seen(k: Kernel, a: Attending) -> Any:
    """Which keys count; None if all do."""
    masks = [] if a.mask is None else [a.mask]
    if a.causal or a.window:
        queries, keys = _sizes(a.query)[-2], _sizes(a.key)[-2]
        rows = k.binary("add", k.iota(queries, "int32"), k.scalar(a.first, "int32"))
        apart = k.binary("sub", k.reshape(rows, (queries, 1)), k.reshape(k.iota(keys, "int32"), (1, keys)))
        if a.causal:
            masks.append(k.binary("ge", apart, k.scalar(0, "int32")))
        if a.window:
            masks.append(k.binary("lt", apart, k.scalar(a.window, "int32")))
        if a.window and not a.causal:
            masks.append(k.binary("gt", apart, k.scalar(-a.window, "int32")))
    if a.segments is not None:
        masks.append(k.binary("eq", *a.segments))
    found = masks[0] if masks else None
    for mask in masks[1:]:
        found = k.binary("and", found, mask)
    return found


def _kept(k: Kernel, a: Attending, weights: Any) -> Any:
    """Weights, or their gradients, after dropout."""
    if a.noise is None:
        return weights
    low, high, key, first = a.noise
    drawn = uniform(k, key, (low, high), _sizes(a.key)[-2], first)
    keep = k.binary("ge", drawn, k.scalar(a.rate, "float32"))
    wide = _wide(a)
    scaled = k.binary("mul", weights, k.scalar(1 / (1 - a.rate), wide))
    return k.where(keep, scaled, k.scalar(0.0, wide))


def with_extra(k: Kernel, lse: Any, extra: float) -> Any:
    """log(exp(lse) + exp(extra))."""
    other = k.scalar(extra, dtype_name(lse))
    top = k.binary("max", lse, other)
    parts = [k.unary("exp", k.binary("sub", x, top)) for x in (lse, other)]
    return k.binary("add", top, k.unary("log", k.binary("add", *parts)))


def _forward(k: Kernel, a: Attending) -> tuple[Any, Any]:
    """Result and log-sum-exp of one block."""
    s = _logits(k, a)
    axis = len(s.shape) - 1
    lse, weights = k.logsumexp(s, axis), k.softmax(s, axis)
    result = _product(k, a, "bnm,bmd->bnd", _kept(k, a, weights), a.value)
    result = _shaped(k, a, result, _sizes(a.value)[-1])
    if a.extra_logit is not None:
        total = with_extra(k, lse, a.extra_logit)
        share = k.unary("exp", k.binary("sub", lse, total))
        result, lse = k.binary("mul", result, k.reshape(share, [*_sizes(share), 1])), total
    return k.cast(result, dtype_name(a.query)), lse


def forward(k: Kernel, a: Attending) -> tuple[Any, Any]:
    """Result and log-sum-exp."""
    _, (result, lse) = _blocks(k, a, [], lambda part, _: ([], [*_forward(k, part)]), lambda _: [])
    return result, lse


def _weights(k: Kernel, a: Attending, lse: Any, dresult: Any, delta: Any) -> tuple[Any, Any]:
    """Of one block: the weights, and the gradient of the logits."""
    s = _logits(k, a)
    axis, column = len(s.shape) - 1, [*_sizes(lse), 1]
    if a.extra_logit is None and not a.partial:
        # Not exp(s - lse): where all keys are hidden, lse has lost how many they are beside `HIDDEN`.
        weights = k.softmax(s, axis)
    else:
        total = k.reshape(lse, column)
        weights = k.exp_less(s, total, axis, False)
        if a.partial and (a.mask is not None or a.segments is not None):
            nothing = k.binary("lt", total, k.scalar(NOTHING_SEEN, _wide(a)))
            weights = k.where(nothing, k.softmax(s, axis), weights)
    dp = _kept(k, a, _shaped(k, a, _product(k, a, "bnd,bmd->bnm", dresult, a.value), s.shape[axis]))
    return weights, k.binary("mul", weights, k.binary("sub", dp, k.reshape(delta, column)))


def _delta(k: Kernel, a: Attending, result: Any, dresult: Any, dlse: Any) -> Any:
    """do · o - dlse for every row."""
    wide = _wide(a)
    product = k.binary("mul", k.cast(dresult, wide), k.cast(result, wide))
    delta = k.reduce("sum", product, [len(result.shape) - 1])
    return delta if dlse is None else k.binary("sub", delta, dlse)


def backward(k: Kernel, a: Attending, result: Any, lse: Any, dresult: Any, dlse: Any) -> tuple[Any, ...]:
    """Gradients of query, key and value; `dlse` may be None."""

    def block(part: Attending, rest: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        weights, dlogits = _weights(k, part, *rest)
        scaled = k.binary("mul", k.cast(part.query, _wide(a)), k.scalar(a.scale, _wide(a)))
        dk = _product(k, part, "bnm,bnd->bmd", dlogits, scaled)
        dv = _product(k, part, "bnm,bnd->bmd", _kept(k, part, weights), rest[1])
        dq = _shaped(k, part, _product(k, part, "bnm,bmd->bnd", dlogits, part.key), part.query.shape[-1])
        sums = [k.reshape(d, _sizes(t)) for d, t in ((dk, part.key), (dv, part.value))]
        return sums, [k.binary("mul", dq, k.scalar(a.scale, _wide(a)))]

    def totals(part: Attending) -> list[list[int]]:
        return [_sizes(part.key), _sizes(part.value)]

    delta = _delta(k, a, result, dresult, dlse)
    (dk, dv), (dq,) = _blocks(k, a, [lse, dresult, delta], block, totals)
    return tuple(k.cast(x, dtype_name(a.query)) for x in (dq, dk, dv))


def bias_gradient(k: Kernel, a: Attending, result: Any, lse: Any, dresult: Any, dlse: Any) -> Any:
    """Gradient of the bias, with as many axes as logits; `dlse` may be None."""
    sizes, queries = _sizes(a.bias), len(a.query.shape) - 2
    repeated = [i for i, n in enumerate(sizes) if n == 1]

    def summed(x: Any, axes: Sequence[int]) -> Any:
        found = [i for i in axes if x.shape[i] > 1]
        return k.reshape(k.reduce("sum", x, found), [1 if i in axes else n for i, n in enumerate(x.shape)])

    def block(part: Attending, rest: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = summed(_weights(k, part, *rest)[1], repeated)
        return ([found], []) if queries in repeated else ([], [found])

    def totals(part: Attending) -> list[list[int]]:
        own = [1 if i in repeated else n for i, n in enumerate(_sizes(part.query)[:-1])]
        return [[*own, sizes[-1]]] if queries in repeated else []

    delta = _delta(k, a, result, dresult, dlse)
    sums, rows = _blocks(k, a, [lse, dresult, delta], block, totals)
    (made,) = (*sums, *rows)
    # Parts of a dimension that shares a bias each made one.
    return k.cast(summed(made, repeated), dtype_name(a.bias))
