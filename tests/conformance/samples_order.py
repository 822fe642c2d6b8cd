"""Samples: order, running sums, indices along a dimension, activations, stacking, sampling."""

from __future__ import annotations

import numpy as np
from scipy import special

import mesh_tf_core as mtf
from mesh_tf_core.ops.neighbours import ReverseAlong
from mesh_tf_core.ops.order import first_extreme
from tests.conformance.helper import Arg, Sample, dims

AB = Arg("a:8 b:4")
TIES = Arg("a:8 b:4", "int:4")


def _top(x: np.ndarray, n: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-x, axis, kind="stable").take(range(n), axis)
    return np.moveaxis(np.take_along_axis(x, order, axis), axis, -1), np.moveaxis(order, axis, -1)


def _put(x: np.ndarray, ids: np.ndarray, most: bool = False) -> np.ndarray:
    out = np.full((4, 8), -np.inf if most else 0.0)
    for b in range(4):
        for c in range(2):
            if 0 <= ids[b, c] < 8:
                out[b, ids[b, c]] = max(out[b, ids[b, c]], x[b, c]) if most else out[b, ids[b, c]] + x[b, c]
    return np.where(np.isinf(out), 0.0, out)


def _shifted(x: np.ndarray, offset: int) -> np.ndarray:
    out = np.zeros_like(x)
    n = len(x)
    for i in range(n):
        if 0 <= i - offset < n:
            out[i] = x[i - offset]
    return out


ORDER = (
    Sample("argmax", "order", lambda g, x: mtf.argmax(x, "a"), (AB,), lambda x: x.argmax(0)),
    Sample("argmax ties", "order", lambda g, x: mtf.argmax(x, "a"), (TIES,), lambda x: x.argmax(0)),
    Sample("argmin", "order", lambda g, x: mtf.argmin(x, "b"), (AB,), lambda x: x.argmin(1)),
    Sample(
        "top_k",
        "order",
        lambda g, x: mtf.top_k(x, "a", mtf.Dim("k", 2)),
        (AB,),
        lambda x: _top(x, 2, 0),
        together=("a b k",),
    ),
    Sample(
        "top_k ties",
        "order",
        lambda g, x: mtf.top_k(x, "a", mtf.Dim("k", 3)),
        (Arg("a:16 b:2", "int:4"),),
        lambda x: _top(x, 3, 0),
        together=("a b k",),
    ),
    Sample(
        "top_k most",
        "order",
        lambda g, x: mtf.top_k(x, "a", mtf.Dim("k", 6)),
        (AB,),
        lambda x: _top(x, 6, 0),
        together=("a b k",),
    ),
    Sample("first_extreme", "order", lambda g, x: first_extreme("max", x, "a"), (AB,), lambda x: x.max(0)),
    Sample("top_1", "order", lambda g, x: mtf.top_1(x, "a"), (AB,), lambda x: (x.max(0), x.argmax(0))),
    Sample("sort", "order", lambda g, x: mtf.sort(x, "a"), (AB,), lambda x: np.sort(x, 0)),
    Sample(
        "sort down", "order", lambda g, x: mtf.sort(x, "b", descending=True), (AB,), lambda x: -np.sort(-x, 1)
    ),
    Sample(
        "argsort ties",
        "order",
        lambda g, x: (mtf.argsort(x, "a"), mtf.argsort(x, "a", descending=True)),
        (TIES,),
        lambda x: (np.argsort(x, 0, kind="stable"), np.argsort(-x, 0, kind="stable")),
    ),
    Sample(
        "nth",
        "order",
        lambda g, x: (mtf.nth_largest(x, 2, "a"), mtf.nth_smallest(x, 1, "a")),
        (AB,),
        lambda x: (np.sort(x, 0)[-3], np.sort(x, 0)[1]),
    ),
)

CUMULATIVE = (
    Sample("cumsum", "cumulative", lambda g, x: mtf.cumsum(x, "a"), (AB,), lambda x: x.cumsum(0)),
    Sample(
        "cumsum exclusive",
        "cumulative",
        lambda g, x: mtf.cumsum(x, "b", exclusive=True),
        (Arg("b:8 a:4 c:2"),),
        lambda x: x.cumsum(0) - x,
    ),
    Sample(
        "cumsum reverse",
        "cumulative",
        lambda g, x: mtf.cumsum(x, "a", exclusive=True, reverse=True),
        (AB,),
        lambda x: x[::-1].cumsum(0)[::-1] - x,
    ),
    Sample(
        "cumsum of ints",
        "cumulative",
        lambda g, x: mtf.cumsum(x, "a", reverse=True),
        (TIES,),
        lambda x: x[::-1].cumsum(0)[::-1],
    ),
)

ALONG = (
    Sample(
        "take_along",
        "index",
        lambda g, x, i: mtf.take_along(x, i, "a"),
        (AB, Arg("c:2 b:4", "int:8")),
        lambda x, i: np.take_along_axis(x, i, 0),
        together=("a b c",),
    ),
    Sample(
        "take_along, rows",
        "index",
        lambda g, x, i: mtf.take_along(x, i, "a"),
        (Arg("b:4 a:8 d:2"), Arg("c:2 b:4", "odd:8")),
        lambda x, i: np.where(
            (i >= 0)[..., None] & (i < 8)[..., None], x[np.arange(4), np.clip(i, 0, 7)], 0.0
        ),
        together=("a b c d",),
    ),
    Sample(
        "put_along, rows",
        "index",
        lambda g, x, i: mtf.put_along(x, i, mtf.Dim("a", 8), ["b"]),
        (Arg("d:2 b:4 c:2"), Arg("b:4 c:2", "odd:8")),
        lambda x, i: np.stack([_put(part, i) for part in x], -1),
        together=("a b c d",),
    ),
    Sample(
        "put_along, most",
        "index",
        lambda g, x, i: mtf.where(
            mtf.is_finite(y := mtf.put_along(x, i, mtf.Dim("a", 8), ["b"], True)), y, 0.0
        ),
        (Arg("b:4 c:2"), Arg("b:4 c:2", "odd:8")),
        lambda x, i: _put(x, i, most=True),
        together=("a b c",),
    ),
    Sample(
        "put_along",
        "index",
        lambda g, x, i: mtf.put_along(x, i, mtf.Dim("a", 8), ["b"]),
        (Arg("b:4 c:2"), Arg("b:4 c:2", "odd:8")),
        _put,
        together=("a b c",),
    ),
)

ACTIVATIONS = (
    Sample("clip", "elementwise", lambda g, x: mtf.clip(x, -0.5, 1.0), (AB,), lambda x: np.clip(x, -0.5, 1)),
    Sample(
        "leaky_relu",
        "elementwise",
        lambda g, x: mtf.leaky_relu(x, 0.1),
        (AB,),
        lambda x: np.maximum(x, 0.1 * x),
    ),
    Sample("elu", "elementwise", lambda g, x: mtf.elu(x), (AB,), lambda x: np.where(x > 0, x, np.expm1(x))),
    Sample("selu", "elementwise", lambda g, x: mtf.selu(x), (AB,)),
    Sample(
        "logical_xor",
        "elementwise",
        lambda g, x, y: mtf.logical_xor(x, y),
        (Arg("a:8 b:4", "bool"), Arg("b:4", "bool")),
        np.logical_xor,
    ),
)

STACKING = (
    Sample("reduce_first", "reduce", lambda g, x: mtf.reduce_first(x, "a"), (AB,), lambda x: x[0]),
    Sample(
        "dynamic_shift",
        "shape",
        lambda g, x, n: (mtf.dynamic_shift(x, n, "a"), mtf.dynamic_shift(x, -n, "a", wrap=True)),
        (AB, Arg("", "int:8")),
        lambda x, n: (_shifted(x, int(n)), np.roll(x, -int(n), 0)),
    ),
    Sample(
        "softmax with an extra logit",
        "softmax",
        lambda g, x, e: (mtf.softmax(x, "a", e), mtf.logsumexp(x, "a", 0.5)),
        (AB, Arg("b:4")),
        lambda x, e: (
            special.softmax(np.concatenate([x, e[None]]), 0)[:-1],
            special.logsumexp(np.concatenate([x, np.full((1, 4), 0.5)]), 0),
        ),
    ),
    Sample(
        "stack",
        "shape",
        lambda g, x, y: mtf.stack([x, y, x, y], "s", 1),
        (AB, AB),
        lambda x, y: np.stack([x, y, x, y], 1),
    ),
    Sample("unstack", "shape", lambda g, x: tuple(mtf.unstack(x, "b")), (AB,), lambda x: tuple(x.T)),
    Sample(
        "split",
        "shape",
        lambda g, x: tuple(mtf.split(x, "a", [2, 4, 2])),
        (AB,),
        lambda x: (x[:2], x[2:6], x[6:]),
    ),
    *(
        Sample(
            f"shift {offset}",
            "shape",
            lambda g, x, offset=offset: mtf.shift(x, offset, "a"),
            (AB,),
            lambda x, offset=offset: _shifted(x, offset),
        )
        for offset in (1, -1, 3, 5, -6)
    ),
    *(
        Sample(
            f"shift {offset} around",
            "shape",
            lambda g, x, offset=offset: mtf.shift(x, offset, "a", wrap=True),
            (AB,),
            lambda x, offset=offset: np.roll(x, offset, 0),
        )
        for offset in (1, 4, 7, -3)
    ),
    Sample("reverse", "shape", lambda g, x: g.apply(ReverseAlong("a"), x), (AB,), lambda x: x[::-1]),
)

SAMPLING = (
    Sample(
        "normal", "random", lambda g, k: mtf.random_normal(k, dims("a:8 b:4"), 1.0, 2.0), (Arg("", "key"),)
    ),
    Sample(
        "categorical",
        "random",
        lambda g, x, k: mtf.sample_with_temperature(x, "a", 0.5, k),
        (AB, Arg("", "key")),
    ),
    Sample(
        "coldest sample",
        "random",
        lambda g, x: mtf.sample_with_temperature(x, "a", 0.0),
        (AB,),
        lambda x: x.argmax(0),
    ),
)

SAMPLES = (*ORDER, *CUMULATIVE, *ALONG, *ACTIVATIONS, *STACKING, *SAMPLING)
