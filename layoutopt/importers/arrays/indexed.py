"""Primitives that read or write elements at computed positions, and primitives that sort."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import Equation, Operand, Var
from layoutopt.importers.arrays.indexing import indexing
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.shapes import sliced
from layoutopt.importers.arrays.writer import Handler, ScalarArray, Writer
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor

COMPARED = 1 << 24
"""Pairs of places that are compared at most."""


def _index(w: Writer, ids: Operand, number: int) -> Tensor | int:
    """One of the numbers of an index, for all indices; int32."""
    value = w.value(ids)
    if isinstance(value, ScalarArray):
        return int(value.value)
    t, last = w.tensor(ids), len(ids.shape) - 1
    if ids.shape[last] > 1:
        t, one = w.one(t, ids, last)
        t = mtf.squeeze(mtf.slice_dim(t, one, number, 1), one.name)
    return t if t.dtype == "int64" else t.cast("int32")


def _clips(e: Equation) -> bool:
    return "clip" in str(e.params.get("mode")).lower()


def _clipped(e: Equation, found: Tensor | int, most: int) -> Tensor | int:
    """An index inside of 0 .. most, where the mode of the operation says so."""
    if not _clips(e):
        return found
    if isinstance(found, int):
        return min(max(found, 0), most)
    return mtf.minimum(mtf.maximum(found, 0), most)


def _places(
    w: Writer, e: Equation, x: Operand, ids: Operand, rows: Operand
) -> tuple[list[tuple[int, Tensor | int]], dict[str, str]]:
    """(axis of x, places along it), in the dimensions of the rows, and what the rest of x is called there."""
    found = indexing(e)
    of_ids = w.between(ids, rows, [*((i, o) for _, i, o in found.common), *found.others])
    of_x = w.between(x, rows, [*found.kept, *((a, o) for a, _, o in found.common)])
    places: list[tuple[int, Tensor | int]] = []
    for a, number in found.looked_up:
        place = _clipped(e, _index(w, ids, number), x.shape[a] - 1)
        places.append((a, w.renamed(place, of_ids) if isinstance(place, Tensor) else place))
    for a, o, number in found.windows:
        begin = 0 if number < 0 else _clipped(e, _index(w, ids, number), x.shape[a] - rows.shape[o])
        begin = w.renamed(begin, of_ids) if isinstance(begin, Tensor) else begin
        places.append((a, w.count(rows, o, "int32") + begin))
    return places, of_x


def _one_place(
    w: Writer, e: Equation, t: Tensor, places: Sequence[tuple[int, Tensor | int]], used: set[str]
) -> tuple[Tensor, Dim, Tensor | int]:
    """t with the axes that are looked up as one dimension, and the places along it."""
    own = [d for a, _ in places for d in w.dims(e.ins[0], a)]
    merged = w.as_one if any(d.name in used for d in own) else w.along
    return *merged(t, own), _flat(e, places)


def _flat(e: Equation, places: Sequence[tuple[int, Tensor | int]]) -> Tensor | int:
    """Places along axes as places along one dimension: outside of it where they are outside of any axis, as
    they would be in another row else."""
    x = e.ins[0]
    place: Any = 0
    inside: Any = None
    for i, (a, at) in enumerate(places):
        place = place * x.shape[a] + at if not isinstance(place, int) or place else at
        if i == 0 or _clips(e):  # Outside of the first axis is outside of all.
            continue
        if isinstance(at, int):
            if not 0 <= at < x.shape[a]:
                return -1
            continue
        own = mtf.logical_and(at >= 0, at < x.shape[a])
        inside = own if inside is None else mtf.logical_and(inside, own)
    return place if inside is None else mtf.where(inside, place, -1)


def _gather(w: Writer, e: Equation) -> None:
    x, ids = e.ins[:2]
    value, outside = w.value(x), e.params.get("fill_value")
    if outside and outside == outside and "fill" in str(e.params.get("mode")).lower():
        refuse(
            e,
            f"for indices out of bounds it returns {outside}, and only 0 is supported",
            "set fill_value=0 and replace those elements with jnp.where",
        )
    if isinstance(value, ScalarArray):
        w.put(e.out, value)
        return
    places, names = _places(w, e, x, ids, e.out)
    t = w.tensor(x)
    places = [(a, p) for a, p in places if any(d.name in t.shape.names for d in w.dims(x, a))]
    if not places:
        w.put(e.out, w.renamed(t, names))
        return
    of_rows = {d.name for d in w.shape(e.out)}
    t, one, place = _one_place(w, e, t, places, of_rows)
    t = w.renamed(t, names)
    w.put(e.out, looked_up(t, place, one))


def looked_up(t: Tensor, place: Tensor | int, one: Dim) -> Tensor:
    """t at places along one dimension."""
    if isinstance(place, int):
        # Under a name that no layout splits: a piece of one element cannot be.
        alone = f"_anonymous_{one.name}"
        return mtf.squeeze(mtf.slice_dim(mtf.rename(t, **{one.name: alone}), alone, place, 1), alone)
    others = t.shape.without(one.name)
    if not len(place.shape):
        return mtf.dynamic_slice(t, place, one)
    if not any(d in others for d in place.shape):
        return mtf.gather(t, place, one)
    if set(others.dims) == set(place.shape.dims):
        return mtf.pick(t, place, one)
    return mtf.take_along(t, place, one)


def _scatter(w: Writer, e: Equation) -> None:
    x, ids, rows = e.ins[:3]
    places, of_x = _places(w, e, x, ids, rows)
    found, most = indexing(e), e.prim == "scatter_max"
    if not places:
        refuse(e, "it overwrites the whole array", "use the new values directly")
    by_rows = {new: old for old, new in of_x.items()}
    back = w.between(x, e.out, [(a, a) for a in range(len(x.shape))])
    own = [d for a, _ in places for d in w.dims(x, a)]
    place: Any = _flat(e, places)
    given = w.full(rows)
    if isinstance(place, int):
        place = mtf.constant(w.graph, place, (), "int32")
    # The dimensions that places are in are summed out, but those that they have in common with the array.
    common = [d.name for _, _, o in found.common for d in w.dims(rows, o)]
    if not len(place.shape):
        single = Dim(w.fresh("single"), 1)
        given, place = mtf.reshape(given, [single, *given.shape]), mtf.reshape(place, [single])
    else:
        lead = [d for _, o in found.others for d in w.dims(rows, o)]
        lead += [d for _, o, _ in found.windows for d in w.dims(rows, o)]
        place = mtf.broadcast(place, [*(d for d in lead if d not in place.shape.dims), *place.shape])
        if e.prim == "scatter":
            given = _last(w, e, place, [d for d in lead if d.name not in common], given)
    flat = Dim(w.fresh("_".join([*(d.name for d in own), "places"])), math.prod(d.size for d in own))
    target = flat if len(own) != 1 or own[0].name in given.shape.names else own[0]

    def put(given: Tensor) -> Tensor:
        names = dict[str, str]()
        made = w.onto(mtf.put_along(given, place, target, common, most), target, own, names)
        return w.renamed(w.renamed(made, {**by_rows, **names}), back)

    made = put(given)
    if e.prim != "scatter":
        if w.number(x) != (-math.inf if most else 0):
            old: Any = w.drawn(w.elementwise(x, e.out), x)
            made = mtf.maximum(made, old) if most else made + old
        w.put(e.out, made)
        return
    hits = put(mtf.broadcast(mtf.constant(w.graph, 1.0), place.shape))
    old = w.elementwise(x, e.out)
    w.put(e.out, mtf.where(hits > 0.5, made, old.value if isinstance(old, ScalarArray) else w.drawn(old, x)))


def _last(w: Writer, e: Equation, place: Tensor, lead: Sequence[Dim], given: Tensor) -> Tensor:
    """Of rows that are written to one place the last, of others 0; `lead` are the dimensions of places, in
    the order in which they are written."""
    count = math.prod(d.size for d in lead)
    if count == 1 or e.params.get("unique_indices") or not indexing(e).others:
        return given
    if count**2 > COMPARED:
        w.notes.append(
            f"{e.where}: {count:,} indices are too many to check for duplicates, so rows that are written to "
            "the same index are summed instead of overwritten; if all indices differ, write "
            "x.at[i].set(y, unique_indices=True)"
        )
        return given
    number: Any = 0
    for d in lead:
        number = number * d.size + mtf.mtf_range(w.graph, d, "int32")
    names = {d.name: w.fresh(f"{d.name}_later") for d in lead}
    same = mtf.equal(place, mtf.rename(place, **names))
    again = mtf.logical_and(same, mtf.rename(number, **names) > number)
    later = mtf.reduce_max(again.cast("float32"), [*names.values()])
    return mtf.where(later < 0.5, given, 0.0)


def _dynamic_slice(w: Writer, e: Equation) -> None:
    x, y, starts = e.ins[0], e.out, e.ins[1:]
    value = w.value(x)
    if isinstance(value, ScalarArray):
        w.put(y, value)
        return
    cut = [a for a in range(len(x.shape)) if x.shape[a] != y.shape[a]]
    known = [w.number(starts[a]) for a in cut]
    if all(n is not None for n in known):
        begins = [min(max(int(n or 0), 0), x.shape[a] - y.shape[a]) for a, n in zip(cut, known, strict=True)]
        w.put(y, sliced(w, x, y, [(a, b, 1) for a, b in zip(cut, begins, strict=True)]))
        return
    t = w.renamed(w.tensor(x), w.between(x, y, [(a, a) for a in range(len(x.shape)) if a not in cut]))
    for a in cut:
        if not any(d.name in t.shape.names for d in w.dims(x, a)):
            continue
        t, one = w.one(t, x, a)
        begin = w.tensor(starts[a]).cast("int32")
        place = mtf.minimum(mtf.maximum(begin, 0), x.shape[a] - y.shape[a])
        if y.shape[a] > 1:
            place = place + w.count(y, a, "int32")
        t = looked_up(t, place, one)
    w.put(y, t)


def _dynamic_update(w: Writer, e: Equation) -> None:
    x, piece, y, starts = e.ins[0], e.ins[1], e.out, e.ins[2:]
    cut = [a for a in range(len(x.shape)) if x.shape[a] != piece.shape[a]]
    base = w.drawn(w.elementwise(x, y), x)
    if not cut:
        w.put(y, w.elementwise(piece, y))
        return
    if len(cut) > 1 or piece.shape[cut[0]] != 1 or len(w.dims(y, cut[0])) != 1:
        refuse(
            e,
            "it writes more than one index, or along more than one axis",
            "use jnp.where, or write one index of one axis at a time",
        )
    (dim,) = w.dims(y, cut[0])
    base = mtf.broadcast(base, w.shape(y))
    given = mtf.broadcast(w.drawn(w.elementwise(piece, y), piece), base.shape.without(dim.name))
    begin = mtf.minimum(mtf.maximum(w.tensor(starts[cut[0]]).cast("int32"), 0), dim.size - 1)
    w.put(y, mtf.dynamic_update(base, given, begin, dim))


def _restored(w: Writer, t: Tensor, one: Dim, x: Operand, y: Var, axis: int) -> Tensor:
    names = w.between(x, y, [(a, a) for a in range(len(x.shape)) if a != axis])
    return w.renamed(w.onto(t, one, w.dims(y, axis), names), names)


def _cumsum(w: Writer, e: Equation) -> None:
    x, axis = e.ins[0], e.params["axis"]
    t, one = w.along(w.tensor(x), w.dims(x, axis))
    if t.dtype == "bool":
        t = t.cast("int32")
    made = mtf.cumsum(t, one, reverse=bool(e.params["reverse"]))
    w.put(e.out, _restored(w, made, one, x, e.out, axis))


def _sort(w: Writer, e: Equation) -> None:
    axis = e.params["dimension"]
    if e.params["num_keys"] != 1:
        refuse(e, "it sorts by more than one key", "sort by one key")
    key, one = w.merged(e.ins[0], axis)
    order: Tensor | None = None
    for i, (x, y) in enumerate(zip(e.ins, e.outs, strict=True)):
        if i == 0:
            made = mtf.sort(key, one)
        else:
            order = order if order is not None else mtf.argsort(key, one)
            t, mine = w.merged(x, axis)
            t = w.renamed(t, w.between(x, e.ins[0], [(a, a) for a in range(len(x.shape)) if a != axis]))
            moved = w.fresh(f"{one.name}_sorted")
            found = looked_up(t, mtf.rename(order, **{one.name: moved}), mine)
            made = mtf.rename(found, **{moved: one.name})
        w.put(y, _restored(w, made, one, e.ins[0], y, axis))


def _top_k(w: Writer, e: Equation) -> None:
    x, axis = e.ins[0], len(e.ins[0].shape) - 1
    if e.params.get("axis", axis) != axis:
        refuse(e, "it is not applied along the last axis", "move the axis to the end with jnp.moveaxis")
    t, one = w.along(w.tensor(x), w.dims(x, axis))
    best = Dim(w.fresh(f"{one.name}_best"), int(e.params["k"]))
    for found, y in zip(mtf.top_k(t, one, best), e.outs, strict=True):
        w.put(y, _restored(w, found, best, x, y, axis))


TABLE: Mapping[str, Handler] = {
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter_max"), _scatter),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "cumsum": _cumsum,
    "sort": _sort,
    "top_k": _top_k,
}
