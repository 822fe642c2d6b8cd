"""Matrix products, convolutions and pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import Equation, Operand
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.shapes import spread
from layoutopt.importers.arrays.writer import Handler, ScalarArray, Writer, our_dtype
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float, itemsize
from mesh_tf_core.ir.tensor import Tensor


class _Slots:
    """Names in one product: every dimension of either operand has one, and no two dimensions the same."""

    def __init__(self, w: Writer) -> None:
        self.w, self.used = w, set[str]()

    def take(self, *wanted: str) -> str:
        name = next((n for n in wanted if n not in self.used), None) or self.w.fresh(wanted[0])
        self.used.add(name)
        return name


def _dot(w: Writer, e: Equation) -> None:
    (lc, rc), (lb, rb) = e.params["dimension_numbers"]
    x, y = e.ins[:2]
    dtype = our_dtype(e.out.dtype)
    numbers = [v.value for v in (w.value(x), w.value(y)) if isinstance(v, ScalarArray)]
    if len(numbers) == 2:
        count = math.prod(x.shape[a] for a in lc)
        w.put(e.out, ScalarArray(numbers[0] * numbers[1] * count, e.out.dtype))
        return
    slots, out = _Slots(w), w.shape(e.out)
    at = 0
    left, right, result = dict[str, str](), dict[str, str](), dict[str, str]()
    # What is summed out has the name that the parameter gives it: renaming it there would move more.
    summed: list[Dim] = []
    frees = [(x, a, left) for a in range(len(x.shape)) if a not in (*lc, *lb)]
    frees += [(y, b, right) for b in range(len(y.shape)) if b not in (*rc, *rb)]
    weights = is_weight(w, y)
    for a, b in zip(lb, rb, strict=True):
        for m, n in _pairs(w, e, x, a, y, b):
            name = slots.take(out[at].name, m.name, n.name)
            left[m.name] = right[n.name] = name
            result[name], at = out[at].name, at + 1
    kept = []
    for operand, axis, names in frees:
        kept.append((operand, axis, names, at))
        at += len(w.dims(operand, axis))
    # Parameters keep their names, so they choose first.
    for operand, axis, names, start in sorted(kept, key=lambda k: not is_weight(w, k[0])):
        for i, d in enumerate(w.dims(operand, axis)):
            target = out[start + i].name
            own = is_weight(w, operand)
            name = slots.take(*((d.name, target) if own else (target, d.name)))
            names[d.name], result[name] = name, target
    for a, b in zip(lc, rc, strict=True):
        for m, n in _pairs(w, e, x, a, y, b):
            name = slots.take(*((n.name, m.name) if weights else (m.name, n.name)))
            left[m.name] = right[n.name] = name
            summed.append(Dim(name, m.size))
    first, second = _alike(w.tensor(x), w.tensor(y), dtype)
    first, second = w.renamed(first, left), w.renamed(second, right)
    here = {*first.shape.names, *second.shape.names}
    before = {new: old for old, new in result.items()}
    order = [Dim(before[d.name], d.size) for d in out if before[d.name] in here]
    made = mtf.einsum([first, second], order)
    lacking = math.prod(d.size for d in summed if d.name not in here)
    made = made if lacking == 1 else made * lacking
    w.put(e.out, w.renamed(made, result).cast(dtype))


def _pairs(w: Writer, e: Equation, x: Operand, a: int, y: Operand, b: int) -> list[tuple[Dim, Dim]]:
    own, other = w.dims(x, a), w.dims(y, b)
    if [d.size for d in own] != [d.size for d in other]:
        refuse(
            e,
            "the two operands divide the contracted axis into different dimensions",
            "reshape both operands in the same way",
        )
    return list(zip(own, other, strict=True))


def is_weight(w: Writer, v: Operand) -> bool:
    """True if an operand is a parameter, or one in another element type or order."""
    found = w.value(v)
    while isinstance(found, Tensor):
        node = w.graph.producer.get(found.id)
        if node is None:
            return found.id in w.weights
        if not node.inputs:
            return hasattr(node.op, "variable")
        if node.op.kind != "data" and not node.op.converts:
            return False
        found = w.graph.tensor(node.inputs[0])
    return False


def _alike(x: Tensor, y: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Both in one element type: of two, the wider one; whole numbers in that of the result."""
    if not is_float(x.dtype) or not is_float(y.dtype):
        return x.cast(dtype), y.cast(dtype)
    wide = x.dtype if itemsize(x.dtype) >= itemsize(y.dtype) else y.dtype
    return x.cast(wide), y.cast(wide)


def _ragged(w: Writer, e: Equation) -> None:
    """Rows times the matrix of their group."""
    numbers = e.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, _) = numbers.dot_dimension_numbers
    (x, f, counts), rows = e.ins[:3], [a for a in range(len(e.ins[0].shape)) if a not in lc]
    if lb or len(e.ins) > 3 or len(counts.shape) != 1 or rows != list(numbers.lhs_ragged_dimensions):
        refuse(
            e,
            "its first operand is not [rows, features] with the rows in consecutive groups",
            "call jax.lax.ragged_dot with operands of that form",
        )
    t, weights = _alike(w.full(x), w.full(f), our_dtype(e.out.dtype))
    (group_axis,) = numbers.rhs_group_dimensions
    weights, group = w.along(weights, w.dims(f, group_axis))
    slots, result, names = _Slots(w), list(w.shape(e.out)), dict[str, str]()
    slots.used.update(t.shape.names)
    for a, b in zip(lc, rc, strict=True):
        names.update((n.name, m.name) for m, n in _pairs(w, e, x, a, f, b))
    names[group.name] = slots.take(group.name)
    made = [d for b in range(len(f.shape)) if b not in (*rc, group_axis) for d in w.dims(f, b)]
    names |= {d.name: slots.take(d.name) for d in made}
    old = [*w.dims(x, rows[0]), *(Dim(names[d.name], d.size) for d in made)]
    group = Dim(names[group.name], group.size)
    ids = _groups(w, x, rows[0], counts, group)
    product = mtf.grouped_product(t, w.renamed(weights, names), ids, group)
    called = {a.name: b.name for a, b in zip(old, result, strict=True)}
    w.put(e.out, w.renamed(product, called).cast(our_dtype(e.out.dtype)))


def _groups(w: Writer, x: Operand, axis: int, counts: Operand, group: Dim) -> Tensor:
    """The group of each row, where the first group's rows come first: how many groups end before it."""
    given, one = w.along(w.full(counts), w.dims(counts, 0))
    ends = mtf.cumsum(mtf.rename(given, **{one.name: group.name}).cast("int32"), group)
    behind = mtf.greater_equal(w.count(x, axis, "int32"), ends).cast("int32")
    return mtf.broadcast(mtf.reduce_sum(behind, group), w.dims(x, axis))


def _conv(w: Writer, e: Equation) -> None:
    d, p = e.params["dimension_numbers"], e.params
    (x, f), y = e.ins, e.out
    groups = p["feature_group_count"]
    if p["batch_group_count"] != 1:
        refuse(e, "it has batch_group_count above 1", "call one convolution per group")
    spatial, taps = [], []
    t, weights = _alike(w.whole(x), w.full(f), our_dtype(y.dtype))
    names: dict[str, str] = w.between(x, y, [(d.lhs_spec[0], d.out_spec[0])])
    pads, strides, dilations = [], [], []
    for i, (a, k, o) in enumerate(zip(d.lhs_spec[2:], d.rhs_spec[2:], d.out_spec[2:], strict=True)):
        t, one = w.along(t, w.dims(x, a))
        weights, tap = w.along(weights, w.dims(f, k))
        if p["lhs_dilation"][i] > 1:
            t, one = spread(w, t, one, p["lhs_dilation"][i] - 1, 0.0)
        low, high = p["padding"][i]
        if min(low, high) < 0:
            size = one.size - max(-low, 0) - max(-high, 0)
            t = mtf.slice_dim(t, one, max(-low, 0), size)
            one = Dim(one.name, size)
        spatial.append((one, o))
        taps.append(tap)
        pads.append((max(low, 0), max(high, 0)))
        strides.append(p["window_strides"][i])
        dilations.append(p["rhs_dilation"][i])
    t, channel = w.along(t, w.dims(x, d.lhs_spec[1]))
    outs = w.dims(f, d.rhs_spec[0])
    grouped: list[Dim] = []
    if groups == 1:
        weights, inner = w.along(weights, w.dims(f, d.rhs_spec[1]))
        weights = w.renamed(weights, {inner.name: channel.name})
        last: Dim | None = channel
    else:
        t, weights, grouped, last, outs = _grouped(w, e, t, weights, channel, groups)
    made = mtf.conv(t, weights, [s for s, _ in spatial], taps, last, strides, dilations, pads, grouped)
    for one, o in spatial:
        made, names = _back(w, made, one, w.dims(y, o), names)
    if groups == 1:
        names.update((a.name, b.name) for a, b in zip(outs, w.dims(y, d.out_spec[1]), strict=True))
    else:
        flat = grouped[0]
        if outs:
            made, flat = w.as_one(made, [*grouped, *outs])
        made, names = _back(w, made, flat, w.dims(y, d.out_spec[1]), names)
    w.put(y, w.renamed(made, names).cast(our_dtype(y.dtype)))


def _back(
    w: Writer, t: Tensor, one: Dim, own: Sequence[Dim], names: dict[str, str]
) -> tuple[Tensor, dict[str, str]]:
    """t with a dimension that windows went along as the axis of the result; or the name that it will have."""
    if len(own) == 1:
        return t, {**names, one.name: own[0].name}
    return w.onto(t, t.shape.dim(one.name), own, names), names


def _grouped(
    w: Writer, e: Equation, t: Tensor, weights: Tensor, channel: Dim, groups: int
) -> tuple[Tensor, Tensor, list[Dim], Dim | None, tuple[Dim, ...]]:
    """Channels and filters as groups of them."""
    d, f = e.params["dimension_numbers"], e.ins[1]
    inner, out = f.shape[d.rhs_spec[1]], f.shape[d.rhs_spec[0]]
    weights, filters = w.along(weights, w.dims(f, d.rhs_spec[0]))
    if inner == 1 and out == groups:
        # Depthwise: one filter for every channel.
        return t, w.renamed(weights, {filters.name: channel.name}), [channel], None, ()
    group = Dim(w.fresh(f"{channel.name}_groups"), groups)
    within = Dim(w.fresh(f"{channel.name}_of_group"), inner)
    made = Dim(w.fresh(f"{filters.name}_of_group"), out // groups)
    t = w.apart(t, channel, [group, within])
    weights = w.apart(weights, filters, [group, made])
    weights, own = w.along(weights, w.dims(f, d.rhs_spec[1]))
    return t, w.renamed(weights, {own.name: within.name}), [group], within, (made,)


def _pool(w: Writer, e: Equation) -> None:
    x, y, p = e.ins[0], e.out, e.params
    if any(n != 1 for n in (*p["base_dilation"], *p["window_dilation"])):
        refuse(e, "it uses dilation", "pool without dilation")
    t, names = w.whole(x), dict[str, str]()
    moving, sizes, strides, pads = [], [], [], []
    for a, n in enumerate(p["window_dimensions"]):
        if n == 1 and p["window_strides"][a] == 1:
            names.update(w.between(x, y, [(a, a)]))
            continue
        t, one = w.along(t, w.dims(x, a))
        moving.append((one, a))
        sizes.append(n)
        strides.append(p["window_strides"][a])
        pads.append(tuple(p["padding"][a]))
    if not moving:
        w.put(y, w.renamed(t, names))
        return
    sign = -1 if e.prim == "reduce_window_min" else 1
    pool = mtf.sum_pool if e.prim == "reduce_window_sum" else mtf.max_pool
    made = pool(t * sign, [one for one, _ in moving], sizes, strides, pads) * sign
    for one, a in moving:
        made, names = _back(w, made, one, w.dims(y, a), names)
    w.put(y, w.renamed(made, names))


TABLE: Mapping[str, Handler] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged,
    "conv_general_dilated": _conv,
    **dict.fromkeys((f"reduce_window_{how}" for how in ("max", "min", "sum")), _pool),
}
