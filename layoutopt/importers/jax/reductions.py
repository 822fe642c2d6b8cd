"""Sums, extremes and their places over dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mesh_tf_core as mtf
from layoutopt.importers.jax.equations import Equation
from layoutopt.importers.jax.writer import Handler, Number, Writer, our_dtype

_REDUCE = {
    "reduce_sum": mtf.reduce_sum,
    "reduce_max": mtf.reduce_max,
    "reduce_min": mtf.reduce_min,
    "reduce_prod": mtf.reduce_prod,
    "reduce_and": mtf.reduce_all,
    "reduce_or": mtf.reduce_any,
}


def _reduce(w: Writer, e: Equation) -> None:
    x, axes = e.ins[0], tuple(e.params["axes"])
    kept = [a for a in range(len(x.shape)) if a not in axes]
    gone = [d for a in axes for d in w.dims(x, a)]
    value = w.value(x)
    if isinstance(value, Number):
        count = math.prod(d.size for d in gone)
        found: Callable[[Any], Any]
        found = {"reduce_sum": lambda v: v * count, "reduce_prod": lambda v: v**count}.get(
            e.prim, lambda v: v
        )
        w.put(e.out, Number(found(value.value), e.out.dtype))
        return
    t = w.drawn(value, x)
    # What is the same all along a dimension is summed by counting.
    lacking = math.prod(d.size for d in gone if d.name not in t.shape.names)
    here = [d.name for d in gone if d.name in t.shape.names]
    done = _REDUCE[e.prim](t, here) if here else t
    if lacking > 1 and e.prim == "reduce_sum":
        done = done * lacking
    elif lacking > 1 and e.prim == "reduce_prod":
        done = mtf.pow(done, float(lacking))
    w.put(e.out, w.renamed(done, w.between(x, e.out, [(a, i) for i, a in enumerate(kept)])))


def _extreme(w: Writer, e: Equation) -> None:
    x, (axis,) = e.ins[0], e.params["axes"]
    t, dim = w.merged(x, axis)
    found = (mtf.argmax if e.prim == "argmax" else mtf.argmin)(t, dim)
    kept = [a for a in range(len(x.shape)) if a != axis]
    named = w.renamed(found, w.between(x, e.out, [(a, i) for i, a in enumerate(kept)]))
    w.put(e.out, named.cast(our_dtype(e.out.dtype)))


TABLE: Mapping[str, Handler] = {
    **dict.fromkeys(_REDUCE, _reduce),
    "argmax": _extreme,
    "argmin": _extreme,
}
