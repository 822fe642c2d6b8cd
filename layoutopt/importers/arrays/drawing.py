"""Primitives that draw random numbers, make keys of numbers, or work on random keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import KEY, CapturedArray, Equation, Operand
from layoutopt.importers.arrays.keys import (
    SEEDED,
    Draw,
    KeyPart,
    Keys,
    at_place,
    counted,
    key_of,
    lost,
    numbered,
    of_words,
    plain,
    premixed,
    shape_of,
)
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.writer import Handler, UndrawnUniform, Writer, our_dtype
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.index import Range


def derived(w: Writer, e: Equation) -> None:
    """Writes an equation that makes keys of keys."""
    for y, keys in zip(e.outs, _made(w, e), strict=True):
        w.put(y, keys)


def _made(w: Writer, e: Equation) -> Sequence[Keys]:
    given = [w.value(x) for x in e.ins]
    already = [x for x in given if isinstance(x, Keys) and x.why]
    if already:
        return [already[0]] * len(e.outs)
    found = _RULES[e.prim](w, e, given) if e.prim in _RULES else None
    return found if found is not None else [lost(f"{e.prim} in {e.where or 'an unknown line'}")] * len(e.outs)


Rule = Callable[[Writer, Equation, Sequence[Any]], Sequence[Keys] | None]


def _same(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    return given if len(given) == len(e.outs) else None


def _words(e: Equation) -> int:
    """How many axes of the operand are words of a key."""
    return int(e.ins[0].dtype != KEY)


def _whole(e: Equation, sizes: Sequence[int]) -> bool:
    """Whether the words of the operand's keys stay together."""
    return not _words(e) or (bool(sizes) and sizes[-1] == e.ins[0].shape[-1])


def _reshape(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    if not _whole(e, e.out.shape):
        return None
    return [given[0].each(lambda a: a.reshape(shape_of(e.out)))]


def _transpose(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    order = list(e.params["permutation"])
    if _words(e) and order.pop() != len(order):
        return None
    return [given[0].each(lambda a: a.transpose(order))]


def _broadcast(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    axes, shape = list(e.params["broadcast_dimensions"]), shape_of(e.out)
    if _words(e) and axes.pop() != len(shape):
        return None

    def spread(a: Any) -> Any:
        sizes = [1] * len(shape)
        for n, axis in zip(a.shape, axes, strict=True):
            sizes[axis] = n
        return np.broadcast_to(a.reshape(sizes), shape)

    return [given[0].each(spread)]


def _slice(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    if not _whole(e, e.out.shape):
        return None
    begins, ends = e.params["start_indices"], e.params["limit_indices"]
    strides = e.params["strides"] or (1,) * len(begins)
    cut = tuple(map(slice, begins, ends, strides))
    return [given[0].each(lambda a: a[cut[: a.ndim]])]


def _dynamic_slice(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    if not _whole(e, e.out.shape):
        return None
    keys, shape = given[0], shape_of(e.out)
    for axis, (size, begin) in enumerate(zip(shape, e.ins[1:], strict=False)):
        known = w.number(begin)
        if known is not None:
            at = min(max(int(known), 0), e.ins[0].shape[axis] - size)
            keys = keys.each(partial(np.take, indices=range(at, at + size), axis=axis))
        elif size != e.ins[0].shape[axis]:
            if size != 1:
                return None
            most = e.ins[0].shape[axis] - 1
            place = mtf.minimum(mtf.maximum(w.tensor(begin).cast("int32"), 0), most)
            one = at_place(keys.each(partial(np.moveaxis, source=axis, destination=0)), place)
            keys = one.each(partial(np.expand_dims, axis=axis))
    return [keys]


def _several(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    """Split and unstack."""
    axis = e.params["axis"]
    if axis >= len(shape_of(e.ins[0])):
        return None
    sizes = e.params["sizes"] if e.prim == "split" else [1] * len(e.outs)
    ends = [int(n) for n in np.cumsum(sizes)]
    out = []
    for size, end in zip(sizes, ends, strict=True):
        places: Any = range(end - size, end) if e.prim == "split" else end - 1
        out.append(given[0].each(partial(np.take, indices=places, axis=axis)))
    return out


def _together(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    """Concatenate and stack."""
    axis = e.params["axis"] if e.prim == "stack" else e.params["dimension"]
    shapes = [shape_of(x) for x in e.ins]
    if axis > len(shapes[0]) - (e.prim != "stack") or not all(isinstance(x, Keys) for x in given):
        return None
    keys = list(given)
    if len({len(x.path) for x in keys}) > 1:
        keys = [premixed(x) for x in keys]
    if len({len(x.path) for x in keys}) > 1 or len({x.stepped for x in keys}) > 1:
        return None
    join = np.stack if e.prim == "stack" else np.concatenate
    parts = []
    for column in zip(*(x.parts for x in keys), strict=True):
        full = [_spread(x, shape) for x, shape in zip(column, shapes, strict=True)]
        parts.append(plain(join(full, axis)))
    return [Keys(parts[0], tuple(parts[1:]), keys[0].stepped)]


def _spread(x: KeyPart, shape: Sequence[int]) -> np.ndarray:
    """A part as an array of a shape."""
    if isinstance(x, np.ndarray):
        return x
    out = np.empty(shape, object if isinstance(x, Tensor) else np.int64)
    out.fill(x)
    return out


def _split(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    old, new = shape_of(e.ins[0]), tuple(e.params["shape"])
    keys = given[0].each(lambda a: np.broadcast_to(a.reshape((*old, *(1 for _ in new))), (*old, *new)))
    numbers = np.broadcast_to(numbered(new), (*old, *new))
    return [keys.then(plain(numbers))]


def _fold_in(w: Writer, e: Equation, given: Sequence[Any]) -> Sequence[Keys] | None:
    keys, numbers = given[0], given[1]
    shape = shape_of(e.out)
    if not isinstance(keys, Keys):
        return None
    part = _numbers(w, e.ins[1], numbers)
    if part is None:
        return None

    def wide(a: Any) -> Any:
        return np.broadcast_to(a.reshape([1] * (len(shape) - a.ndim) + list(a.shape)), shape)

    return [keys.each(wide).then(plain(wide(part)) if isinstance(part, np.ndarray) else part)]


def _numbers(w: Writer, v: Operand, value: Any) -> KeyPart | None:
    """Numbers that are folded in."""
    known = w.number(v)
    if known is not None:
        return int(known) % 2**32
    if isinstance(v, CapturedArray):
        return np.asarray(v.value).astype(np.int64) % 2**32
    if not isinstance(value, Tensor):
        return None
    if not len(value.shape):
        return value
    maker = w.graph.producer.get(value.id)
    if len(v.shape) == 1 and maker is not None and isinstance(maker.op, Range):
        return np.arange(v.shape[0])
    return None


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("random_wrap", "random_unwrap", "random_clone", "random_seed", "copy", "copy_p", "stop_gradient"),
        _same,
    ),
    **dict.fromkeys(("optimization_barrier", "device_put", "sharding_constraint", "reshard", "pvary"), _same),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    **dict.fromkeys(("concatenate", "stack"), _together),
    **dict.fromkeys(("split", "unstack"), _several),
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "random_split": _split,
    "random_fold_in": _fold_in,
}


KEYED = (*(prim for prim in _RULES if prim.startswith("random_")), "threefry2x32")
"""Primitives of keys alone."""


def of_numbers(w: Writer, x: Operand, seed: bool = False) -> Keys:
    """Keys of the words that an array has along its last axis, or of a seed."""
    array = np.asarray(x.value) if isinstance(x, CapturedArray) and x.value is not None else None
    known = w.number(x) if array is None else None
    if known is not None:
        array = np.full(x.shape, known)
    if array is not None:
        array = array.astype(np.uint64)
        words = [array >> 32, array % 2**32] if seed else list(np.moveaxis(array, -1, 0))
        return of_words(words)
    t = w.tensor(x)
    if seed:
        return Keys(SEEDED, (0, t)) if not x.shape else lost("an array of seeds")
    if len(x.shape) != 1:
        return lost("an array of raw key data")
    t, one = w.one(t, x, 0)
    return Keys(SEEDED, tuple(mtf.squeeze(mtf.slice_dim(t, one, i, 1), one.name) for i in range(x.shape[0])))


def _drawing(w: Writer, e: Equation, kind: str) -> Keys:
    """The keys that an equation draws with.

    Raises:
      UserError: they cannot be followed, or draw something else too, which JAX makes of the same bits.
    """
    found = w.value(e.ins[0])
    keys = found if isinstance(found, Keys) else of_numbers(w, e.ins[0])
    if keys.why or any(isinstance(x, np.ndarray) and counted(x) for x in keys.parts):
        refuse(
            e,
            f"its random key comes from {keys.why or 'several keys of a loop'}, so the importer cannot "
            "tell which draws are equal",
            "make keys with jax.random.split and jax.random.fold_in, and do not change them otherwise",
        )
    how = kind, tuple(d.size for d in w.shape(e.out))
    for other in w.drawn_with:
        same = other.keys.identity == keys.identity
        if (same and other.how != how) or (not same and keys.meets(other.keys)):
            refuse(
                e,
                f"{other.where or 'another line'} draws numbers of another kind or shape with the same "
                "key, so JAX makes both from the same bits",
                "give each draw its own key with jax.random.split",
            )
    w.drawn_with.append(Draw(keys, how, e.where))
    return keys


def _uniform(w: Writer, e: Equation) -> None:
    ends = [w.number(x) for x in e.ins[1:3]]
    low, high = (0.0, 1.0) if len(ends) < 2 else ends
    if low is None or high is None:
        refuse(e, "its bounds are not constants", "draw between 0 and 1, then scale and shift the result")
    keys = _drawing(w, e, "uniform")
    w.put(e.out, UndrawnUniform(float(low), float(high), w.shape(e.out), e.out.dtype, keys))


def _normal(w: Writer, e: Equation) -> None:
    keys, dims, dtype = _drawing(w, e, "normal"), w.shape(e.out), our_dtype(e.out.dtype)
    found = w.graph.once(
        (keys.identity, dims, dtype), lambda: mtf.random_normal(key_of(w.graph, keys), dims, dtype=dtype)
    )
    w.put(e.out, found)


RANDOM = "draw with jax.random.uniform, jax.random.bernoulli or jax.random.normal"
TABLE: Mapping[str, Handler] = {
    "random_uniform": _uniform,
    "random_normal": _normal,
    "random_bits": lambda _, e: refuse(e, "it draws raw random bits", RANDOM),
    KEY: derived,
    **dict.fromkeys(KEYED, lambda w, e: w.put(e.out, of_numbers(w, e.ins[0], seed=e.prim == "random_seed"))),
}
