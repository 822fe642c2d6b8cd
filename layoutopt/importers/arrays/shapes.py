"""Primitives that move, repeat, join and cut elements."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import Equation, Operand, Var, is_empty
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.writer import Handler, ScalarArray, Writer, our_dtype
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor


def _broadcast(w: Writer, e: Equation) -> None:
    x, y = e.ins[0], e.out
    alike = [(i, a) for i, a in enumerate(e.params["broadcast_dimensions"]) if x.shape[i] == y.shape[a]]
    w.put(y, w.fitted(x, y, alike))


def _of_numbers(handler: Handler) -> Handler:
    """A handler of a primitive whose results are elements of its operands: of one number, they are it."""

    def write(w: Writer, e: Equation) -> None:
        first, *others = (w.value(x) for x in e.ins if not is_empty(x))
        if isinstance(first, ScalarArray) and all(other == first for other in others):
            for y in e.outs:
                w.put(y, first)
        else:
            handler(w, e)

    return write


@_of_numbers
def _reshape(w: Writer, e: Equation) -> None:
    x, y = e.ins[0], e.out
    value = w.value(x)
    old, new = w.shape(x), w.shape(y)
    if id(e) in w.classes.factors.whole:
        w.put(y, mtf.reshape(w.full(x), new))
        return
    names = {a.name: b.name for a, b in zip(old, new, strict=True)}
    if not isinstance(value, Tensor) and all(a == b for a, b in names.items()):
        w.put(y, value)
    else:
        w.put(y, w.renamed(w.tensor(x), names))


def _moved(w: Writer, e: Equation, axes: Sequence[int]) -> None:
    w.put(e.out, w.fitted(e.ins[0], e.out, [(a, i) for i, a in enumerate(axes)]))


def _iota(w: Writer, e: Equation) -> None:
    axis, dtype = e.params["dimension"], our_dtype(e.out.dtype)
    if e.out.shape[axis] == 1:
        w.put(e.out, ScalarArray(0, e.out.dtype))
    else:
        w.put(e.out, w.count(e.out, axis, dtype))


def taken(w: Writer, x: Operand, y: Var, axis: int, begin: int, stride: int = 1) -> Tensor:
    """The elements of an axis of x that y has, from `begin`."""
    size = y.shape[axis]
    piece = _piece(w, x, y, axis, begin) if stride == 1 else None
    others = [(a, a) for a in range(len(x.shape)) if a != axis]
    if piece is not None:
        return w.renamed(piece, w.between(x, y, others))
    t, one = w.merged(x, axis)
    cut = w.renamed(_strided(t, one, begin, size, stride), w.between(x, y, others))
    return w.apart(cut, Dim(one.name, size), w.dims(y, axis))


def _piece(w: Writer, x: Operand, y: Var, axis: int, begin: int) -> Tensor | None:
    """One of the equal pieces that the axis is made of, None if y is none of them."""
    own, inner = w.dims(x, axis), w.dims(y, axis)
    lead = own[: len(own) - len(inner)]
    width = math.prod(d.size for d in inner)
    rest = [d.size for d in own[len(lead) :]]
    if math.prod(d.size for d in lead) == 1 or rest != [d.size for d in inner] or begin % width:
        return None
    t = w.tensor(x)
    t = w.renamed(t, {a.name: b.name for a, b in zip(own[len(lead) :], inner, strict=True)})
    here = [d for d in lead if d.name in t.shape.names]
    places = np.unravel_index(begin // width, [d.size for d in lead])
    for d, place in zip(lead, places, strict=True):
        if d not in here:
            continue
        # Under a name that no layout splits: a piece of one element cannot be.
        t, one = w.as_one(t, [d])
        t = mtf.squeeze(mtf.slice_dim(t, one, int(place), 1), one.name)
    return t


@_of_numbers
def _slice(w: Writer, e: Equation) -> None:
    x, y = e.ins[0], e.out
    begins, strides = e.params["start_indices"], e.params["strides"] or (1,) * len(x.shape)
    cut = [a for a in range(len(x.shape)) if x.shape[a] != y.shape[a]]
    w.put(y, sliced(w, x, y, [(a, begins[a], strides[a]) for a in cut]))


def sliced(w: Writer, x: Operand, y: Var, cuts: Sequence[tuple[int, int, int]]) -> Tensor:
    """x cut along some axes: (axis, begin, stride) each."""
    if not cuts:
        fitted = w.fitted(x, y, [(a, a) for a in range(len(x.shape))])
        return w.drawn(fitted, x)
    (axis, begin, stride), *rest = cuts
    if not rest:
        return taken(w, x, y, axis, begin, stride)
    t, names = w.tensor(x), dict[str, str]()
    for axis, begin, stride in cuts:
        t, one = w.one(t, x, axis)
        size = y.shape[axis]
        t = _strided(t, one, begin, size, stride)
        t = w.onto(t, Dim(one.name, size), w.dims(y, axis), names)
    others = [(a, a) for a in range(len(x.shape)) if all(a != c for c, _, _ in cuts)]
    return w.renamed(t, {**w.between(x, y, others), **names})


def _strided(t: Tensor, one: Dim, begin: int, size: int, stride: int) -> Tensor:
    """Every so many elements of one dimension from `begin` on, `size` of them."""
    t = mtf.slice_dim(t, one, begin, min((size - 1) * stride + 1, one.size - begin))
    if stride == 1:
        return t
    here = t.shape.dim(one.name).size
    return mtf.strided(mtf.pad(t, one.name, 0, size * stride - here), one.name, stride)


@_of_numbers
def _split(w: Writer, e: Equation) -> None:
    axis, begin = e.params["axis"], 0
    for y, size in zip(e.outs, e.params["sizes"], strict=True):
        w.put(y, taken(w, e.ins[0], y, axis, begin))
        begin += size


def _name(own: Sequence[Dim], how: str) -> str:
    """What dimensions are called while they are made."""
    return "_".join([*(d.name for d in own), how])


@_of_numbers
def _concatenate(w: Writer, e: Equation) -> None:
    axis, y = e.params["dimension"], e.out
    given = [x for x in e.ins if not is_empty(x)]
    if len(given) == 1:
        w.put(y, w.elementwise(given[0], y))
        return
    others = [(a, a) for a in range(len(y.shape)) if a != axis]
    if id(e) in w.classes.factors.joined and _joined(w, e, axis, others):
        return
    parts, rest = [], [d for a, _ in others for d in w.dims(y, a)]
    name = w.fresh(_name(w.dims(y, axis), "joined"))
    for x in given:
        t, one = w.merged(x, axis)
        t = mtf.rename(w.renamed(t, w.between(x, y, others)), **{one.name: name})
        parts.append((t, Dim(name, x.shape[axis])))
    # Dimensions that no part has are the same all along.
    had = [d for d in rest if any(d.name in t.shape.names for t, _ in parts)]
    whole = mtf.concat([mtf.broadcast(t, [*had, one]) for t, one in parts], name)
    w.put(y, w.apart(whole, Dim(name, y.shape[axis]), w.dims(y, axis)))


def _joined(w: Writer, e: Equation, axis: int, others: list[tuple[int, int]]) -> bool:
    """Equal pieces as elements of the dimension that numbers them; False if they have other factors."""
    y = e.out
    own = w.dims(y, axis)
    inner = w.dims(e.ins[0], axis)
    lead = own[: len(own) - len(inner)]
    if math.prod(d.size for d in lead) != len(e.ins):
        return False
    rows, rest = [], [*(d for a, _ in others for d in w.dims(y, a)), *own[len(lead) :]]
    for x in e.ins:
        names = w.between(x, y, others)
        mine = w.dims(x, axis)
        if [d.size for d in mine] != [d.size for d in own[len(lead) :]]:
            return False
        names.update((a.name, b.name) for a, b in zip(mine, own[len(lead) :], strict=True))
        rows.append(w.renamed(w.tensor(x), names))
    had = [d for d in rest if any(d.name in t.shape.names for t in rows)]
    name = w.fresh(_name(lead, "joined"))
    whole = mtf.stack([mtf.broadcast(t, had) for t in rows], name)
    w.put(y, w.apart(whole, Dim(name, len(e.ins)), lead))
    return True


@_of_numbers
def _stack(w: Writer, e: Equation) -> None:
    axis, y = e.params["axis"], e.out
    kept = [a for a in range(len(y.shape)) if a != axis]
    rows = [w.drawn(w.fitted(x, y, list(enumerate(kept))), x) for x in e.ins]
    had = [d for a in kept for d in w.dims(y, a) if any(d.name in t.shape.names for t in rows)]
    name = w.fresh(_name(w.dims(y, axis), "stacked"))
    whole = mtf.stack([mtf.broadcast(t, had) for t in rows], name)
    w.put(y, w.apart(whole, Dim(name, len(rows)), w.dims(y, axis)))


@_of_numbers
def _unstack(w: Writer, e: Equation) -> None:
    x, axis = e.ins[0], e.params["axis"]
    kept = [a for a in range(len(x.shape)) if a != axis]
    for i, y in enumerate(e.outs):
        t, one = w.merged(x, axis)
        t = mtf.squeeze(mtf.slice_dim(t, one, i, 1), one.name)
        w.put(y, w.renamed(t, w.between(x, y, [(a, b) for b, a in enumerate(kept)])))


@_of_numbers
def _tile(w: Writer, e: Equation) -> None:
    """Copies are a dimension that x has not: it is the same along it."""
    x, y, reps = e.ins[0], e.out, e.params["reps"]
    t, names = w.tensor(x), dict[str, str]()
    for a, count in enumerate(reps):
        own, made = w.dims(x, a), w.dims(y, a)
        lead = made[: len(made) - len(own)]
        if [d.size for d in made[len(lead) :]] == [d.size for d in own]:
            names.update((d.name, m.name) for d, m in zip(own, made[len(lead) :], strict=True))
            continue
        # The result is cut elsewhere than between its copies.
        t, one = w.one(t, x, a)
        copies = Dim(w.fresh(f"{one.name}_copies"), count)
        at = t.shape.index(one.name)
        t = mtf.broadcast(t, [*t.shape.dims[:at], copies, *t.shape.dims[at:]])
        t, whole = w.as_one(t, [copies, one])
        t = w.onto(t, whole, made, names)
    w.put(y, w.renamed(t, names))


def _pad(w: Writer, e: Equation) -> None:
    x, y, config = e.ins[0], e.out, e.params["padding_config"]
    value = w.number(e.ins[1])
    if value is None:
        refuse(e, "its padding value is not a constant", "pad with a constant")
    if is_empty(x) or w.number(x) == value:
        w.put(y, ScalarArray(value, y.dtype))
        return
    t = w.tensor(x)
    names: dict[str, str] = {}
    for a, (low, high, inside) in enumerate(config):
        if (low, high, inside) == (0, 0, 0):
            names.update(w.between(x, y, [(a, a)]))
            continue
        t, one = w.one(t, x, a)
        if inside:
            t, one = spread(w, t, one, inside, value)
        t = mtf.pad(t, one.name, max(low, 0), max(high, 0), value)
        one = t.shape.dim(one.name)
        t = mtf.slice_dim(t, one, max(-low, 0), y.shape[a])
        t = w.onto(t, Dim(one.name, y.shape[a]), w.dims(y, a), names)
    w.put(y, w.renamed(t, names))


def spread(w: Writer, t: Tensor, one: Dim, inside: int, value: float) -> tuple[Tensor, Dim]:
    """Inserts `inside` elements of a value between those of one dimension."""
    at = t.shape.index(one.name)
    phase = Dim(w.fresh("single"), 1)
    apart = mtf.reshape(t, [*t.shape.dims[: at + 1], phase, *t.shape.dims[at + 1 :]])
    apart = mtf.pad(apart, phase, 0, inside, value)
    long = Dim(one.name, one.size * (inside + 1))
    flat = mtf.reshape(apart, [*t.shape.dims[:at], long, *t.shape.dims[at + 1 :]])
    size = (one.size - 1) * (inside + 1) + 1
    return mtf.slice_dim(flat, long, 0, size), Dim(one.name, size)


@_of_numbers
def _reverse(w: Writer, e: Equation) -> None:
    x, y = e.ins[0], e.out
    t = w.tensor(x)
    names = w.between(x, y, [(a, a) for a in range(len(x.shape)) if a not in e.params["dimensions"]])
    for a in e.params["dimensions"]:
        own = w.dims(x, a)
        if not own or not any(d.name in t.shape.names for d in own):
            continue
        t, one = w.one(t, x, a)
        turned = Dim(w.fresh(f"{one.name}_reversed"), one.size)
        t = mtf.gather(t, one.size - 1 - mtf.mtf_range(w.graph, turned), one)
        t = w.onto(t, turned, w.dims(y, a), names)
    w.put(y, w.renamed(t, names))


TABLE: Mapping[str, Handler] = {
    "broadcast_in_dim": _broadcast,
    "transpose": lambda w, e: _moved(w, e, e.params["permutation"]),
    "squeeze": lambda w, e: _moved(w, e, e.kept),
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "rev": _reverse,
}
