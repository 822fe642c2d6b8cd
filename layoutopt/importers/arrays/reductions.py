"""Sums, extremes and their places over dimensions."""

import math
from collections.abc import Mapping, Sequence

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import FIRST, Equation
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.writer import Handler, ScalarArray, Writer, our_dtype
from mesh_tf_core.ops.order import first_extreme

_REDUCE = {f"reduce_{name}": getattr(mtf, f"reduce_{name}") for name in ("sum", "max", "min", "prod")}
_REDUCE |= {"reduce_and": mtf.reduce_all, "reduce_or": mtf.reduce_any}
_OF_NOTHING = {"reduce_sum": 0, "reduce_prod": 1, "reduce_and": True, "reduce_or": False}
"""Reductions of arrays without elements."""


def _reduce(w: Writer, e: Equation) -> None:
    x, axes = e.ins[0], tuple(e.params["axes"])
    kept = [a for a in range(len(x.shape)) if a not in axes]
    value = w.value(x)
    if isinstance(value, ScalarArray):
        count = math.prod(x.shape[a] for a in axes)
        if not count and e.prim not in _OF_NOTHING:
            refuse(
                e,
                "it reduces an array without elements, which has no maximum or minimum",
                "remove this operation",
            )
        found = value.value * count if e.prim == "reduce_sum" else value.value
        found = found**count if e.prim == "reduce_prod" else found
        made = found if count else _OF_NOTHING[e.prim]
        w.put(e.out, ScalarArray(made, e.out.dtype))
        return
    if FIRST in e.params:
        t, dim = w.merged(x, axes[0])
        w.put(e.out, w.renamed(first_extreme(e.prim.removeprefix("reduce_"), t, dim), _between(w, e, kept)))
        return
    gone = [d for a in axes for d in w.dims(x, a)]
    t = w.drawn(value, x)
    # What is the same all along a dimension is summed by counting.
    lacking = math.prod(d.size for d in gone if d.name not in t.shape.names)
    here = [d.name for d in gone if d.name in t.shape.names]
    done = _REDUCE[e.prim](t, here) if here else t
    if lacking > 1 and e.prim == "reduce_sum":
        done = done * lacking
    elif lacking > 1 and e.prim == "reduce_prod":
        done = mtf.pow(done, float(lacking))
    w.put(e.out, w.renamed(done, _between(w, e, kept)))


def _between(w: Writer, e: Equation, kept: Sequence[int]) -> dict[str, str]:
    """The names of dimensions that are left -> those of the result."""
    return w.between(e.ins[0], e.out, [(a, i) for i, a in enumerate(kept)])


def _extreme(w: Writer, e: Equation) -> None:
    x, (axis,) = e.ins[0], e.params["axes"]
    t, dim = w.merged(x, axis)
    found = (mtf.argmax if e.prim == "argmax" else mtf.argmin)(t, dim)
    kept = [a for a in range(len(x.shape)) if a != axis]
    w.put(e.out, w.renamed(found, _between(w, e, kept)).cast(our_dtype(e.out.dtype)))


TABLE: Mapping[str, Handler] = {**dict.fromkeys(_REDUCE, _reduce), "argmax": _extreme, "argmin": _extreme}
