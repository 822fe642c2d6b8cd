"""Samples: shapes, indices, random numbers, loops."""

from __future__ import annotations

from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.ir.kernel import PartRows
from mesh_tf_core.ops.random import Dropout
from tests.conformance.helper import Arg, Sample, dims

AB = Arg("a:8 b:4")
ABC = Arg("a:8 b:4 c:2")


def _table(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    inside = (ids >= 0) & (ids < len(table))
    return np.where(inside[..., None], table[np.clip(ids, 0, len(table) - 1)], 0)


def _scatter(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    out = np.zeros((8, rows.shape[-1]))
    for row, i in zip(rows.reshape(-1, rows.shape[-1]), ids.reshape(-1), strict=True):
        if 0 <= i < 8:
            out[i] += row
    return out


SHAPE = (
    Sample("rename", "shape", lambda g, x: mtf.rename(x, a="c"), (AB,), lambda x: x),
    Sample(
        "rename swaps", "shape", lambda g, x: mtf.rename(x, a="b", b="a"), (Arg("a:8 b:8 c:2"),), lambda x: x
    ),
    Sample(
        "rename and use",
        "shape",
        lambda g, x: mtf.einsum([x, mtf.rename(x, a="c")], dims("a:8 c:8")),
        (AB,),
        lambda x: x @ x.T,
        together=("a b c",),
    ),
    Sample(
        "reshape merge",
        "shape",
        lambda g, x: mtf.reshape(x, dims("d:32 c:2")),
        (ABC,),
        lambda x: x.reshape(32, 2),
    ),
    Sample(
        "reshape split",
        "shape",
        lambda g, x: mtf.reshape(x, dims("c:4 d:2 b:4")),
        (AB,),
        lambda x: x.reshape(4, 2, 4),
    ),
    Sample(
        "reshape regroup",
        "shape",
        lambda g, x: mtf.reshape(x, dims("c:2 d:16 e:2")),
        (ABC,),
        lambda x: x.reshape(2, 16, 2),
    ),
    Sample(
        "reshape same name",
        "shape",
        lambda g, x: mtf.reshape(x, dims("a:32")),
        (AB,),
        lambda x: x.reshape(32),
    ),
    Sample(
        "reshape moves a name",
        "shape",
        lambda g, x: mtf.reshape(x, dims("c:8 a:4")),
        (Arg("a:4 b:8"),),
        lambda x: x.reshape(8, 4),
    ),
    Sample(
        "reshape one", "shape", lambda g, x: mtf.reshape(x, dims("one:1 a:8 b:4")), (AB,), lambda x: x[None]
    ),
    Sample(
        "transpose",
        "shape",
        lambda g, x: mtf.transpose(x, dims("c:2 a:8 b:4")),
        (ABC,),
        lambda x: x.transpose(2, 0, 1),
    ),
    Sample(
        "concat",
        "shape",
        lambda g, x, y: mtf.concat([x, y, x], "b"),
        (AB, Arg("a:8 b:8")),
        lambda x, y: np.concatenate([x, y, x], 1),
    ),
    Sample(
        "concat first",
        "shape",
        lambda g, x, y: mtf.concat([x, y], "a"),
        (AB, Arg("a:4 b:4")),
        lambda x, y: np.concatenate([x, y]),
    ),
    Sample("slice", "shape", lambda g, x: mtf.slice_dim(x, "a", 2, 4), (AB,), lambda x: x[2:6]),
    Sample(
        "concat of three sizes",
        "shape",
        lambda g, x, y, z: mtf.concat([x, y, z], "a"),
        (Arg("a:8 b:2"), Arg("b:2 a:16"), Arg("a:8 b:2")),
        lambda x, y, z: np.concatenate([x, y.T, z]),
    ),
    Sample("strided", "shape", lambda g, x: mtf.strided(x, "a", 2), (Arg("b:2 a:16"),), lambda x: x[:, ::2]),
    Sample(
        "squeeze",
        "shape",
        lambda g, x: mtf.squeeze(x, "one"),
        (Arg("a:8 one:1 b:4"),),
        lambda x: x[:, 0],
    ),
    Sample(
        "split in parts",
        "shape",
        lambda g, x: tuple(mtf.split(x, "a", [4, 8, 4])),
        (Arg("b:2 a:16"),),
        lambda x: (x[:, :4], x[:, 4:12], x[:, 12:]),
    ),
    Sample("slice rough", "shape", lambda g, x: mtf.slice_dim(x, "a", 3, 5), (ABC,), lambda x: x[3:]),
    Sample(
        "pad",
        "shape",
        lambda g, x: mtf.pad(x, "a", 3, 5, 0.5),
        (AB,),
        lambda x: np.pad(x, [(3, 5), (0, 0)], constant_values=0.5),
    ),
)

SHAPE += (
    Sample(
        "halo_exchange",
        "shape",
        lambda g, x: mtf.halo_exchange(x, "a", "w", 2, 1),
        (Arg("a:8 b:2 w:3"),),
        lambda x: np.stack(
            [
                np.pad(x.transpose(0, 2, 1).reshape(24, 2), [(2, 1), (0, 0)])[3 * i : 3 * i + 6].T
                for i in range(8)
            ]
        ),
    ),
    Sample(
        "halo_exchange around",
        "shape",
        lambda g, x: mtf.halo_exchange(x, "a", "w", 0, 2, wrap=True),
        (Arg("a:4 w:2"),),
        lambda x: np.concatenate([x, np.roll(x, -1, 0)], 1),
    ),
    Sample(
        "filled",
        "shape",
        lambda g, x: mtf.ones_like(x) * x + mtf.zeros(g, x.shape, x.dtype),
        (AB,),
        lambda x: x,
    ),
)

INDEX = (
    Sample(
        "one_hot of two values",
        "index",
        lambda g, i: mtf.one_hot(i, mtf.Dim("v", 8), "float32", 0.75, 0.25),
        (Arg("a:8 b:4", "odd:8"),),
        lambda i: np.where(i[..., None] == np.arange(8), 0.75, 0.25),
    ),
    Sample("range", "index", lambda g, x: x + mtf.mtf_range(g, x.dim("a"), x.dtype), (AB,)),
    Sample(
        "one_hot",
        "index",
        lambda g, i: mtf.one_hot(i, mtf.Dim("v", 8), "int32"),
        (Arg("a:8 b:4", "odd:8"),),
        lambda i: (i[..., None] == np.arange(8)).astype(np.int32),
    ),
    Sample(
        "gather",
        "index",
        lambda g, t, i: mtf.gather(t, i, "v"),
        (Arg("v:8 d:4"), Arg("a:8 b:2", "odd:8")),
        _table,
        together=("v d a b",),
    ),
    Sample(
        "long ids",
        "index",
        lambda g, t, i: (
            mtf.gather(t, i, "v"),
            mtf.einsum([mtf.one_hot(i, mtf.Dim("v", 8), t.dtype), t], [i.dim("a"), t.dim("d")]),
        ),
        (Arg("v:8 d:4"), Arg("a:8", "long:8")),
        lambda t, i: (t[i], t[i]),
        together=("v d a",),
    ),
    Sample(
        "gather from the middle",
        "index",
        lambda g, t, i: mtf.gather(t, i, "v"),
        (Arg("c:2 v:8 d:4"), Arg("a:8", "int:8")),
        lambda t, i: t[:, i].transpose(1, 0, 2),
        together=("c v d a",),
    ),
    Sample(
        "scatter_add",
        "index",
        lambda g, x, i: mtf.scatter_add(x, i, mtf.Dim("v", 8)),
        (Arg("a:8 b:2 d:4"), Arg("a:8 b:2", "odd:8")),
        _scatter,
        together=("v d a b",),
    ),
    Sample(
        "pick",
        "index",
        lambda g, x, i: mtf.pick(x, i, "a"),
        (Arg("b:4 a:8 c:2"), Arg("c:2 b:4", "int:8")),
        lambda x, i: np.take_along_axis(x, i.T[:, None, :], 1)[:, 0].T,
    ),
)

KEY = Arg("", "key")

RANDOM = (
    Sample("dropout", "random", lambda g, x, k: mtf.dropout(x, 0.3, k), (ABC, KEY)),
    Sample(
        "dropout of whole rows",
        "random",
        lambda g, x, k: mtf.dropout(x, 0.3, k, noise_shape=dims("c:2 a:8")),
        (ABC, KEY),
    ),
    Sample("uniform", "random", lambda g, k: mtf.random_uniform(k, dims("a:8 b:4"), -1.0, 2.0), (KEY,)),
    Sample(
        "dropout of a part of a batch",
        "random",
        lambda g, x, k, n: g.apply(Dropout(0.3, rows=PartRows(mtf.Shape(dims("a:32")), 8)), x, k, n),
        (ABC, KEY, KEY),
    ),
)


def _stack(g: mtf.Graph, x: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    return mtf.scan(
        lambda h, u: mtf.tanh(mtf.rename(mtf.einsum([h, u], dims("a:4 c:4")), c="b")), x, mtf.Dim("l", 3), [w]
    )


def _collect(g: mtf.Graph, x: mtf.Tensor, w: mtf.Tensor) -> Any:
    def body(h: mtf.Tensor, u: mtf.Tensor) -> Any:
        h = mtf.sigmoid(h * u) + x
        return h, (h * h, mtf.reduce_sum(h, "b"))

    last, (squares, sums) = mtf.scan(body, x, mtf.Dim("l", 3), [w])
    return last, squares, sums


def _nested(g: mtf.Graph, x: mtf.Tensor, v: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    def inner(h: mtf.Tensor, u: mtf.Tensor) -> mtf.Tensor:
        return mtf.tanh(h + u) * 0.7 + x

    def outer(h: mtf.Tensor, t: mtf.Tensor) -> mtf.Tensor:
        scaled = mtf.tanh(h * t)
        return mtf.scan(lambda s, u: inner(s, u) * scaled, h * t, mtf.Dim("m", 2), [w])

    return mtf.scan(outer, x, mtf.Dim("l", 3), [v])


def _np_stack(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    for u in w:
        x = np.tanh(x @ u)
    return x


def _np_nested(x: np.ndarray, v: np.ndarray, w: np.ndarray) -> np.ndarray:
    h = x
    for t in v:
        scaled, s = np.tanh(h * t), h * t
        for u in w:
            s = (np.tanh(s + u) * 0.7 + x) * scaled
        h = s
    return h


def _cubed(g: mtf.Graph, x: mtf.Tensor, y: mtf.Tensor) -> Any:
    """x^3 y and x - y with gradients of their own, which are the true ones."""

    def backward(dys: Any, xs: Any, outputs: Any) -> Any:
        (a, b), (da, db) = xs, dys
        return 3.0 * a * a * b * da + db, a * a * a * da - db

    return mtf.custom_gradient(lambda a, b: (a * a * a * b, a - b), backward, [x, y])


def _loop_until(g: mtf.Graph, x: mtf.Tensor, w: mtf.Tensor) -> Any:
    return mtf.while_loop(
        lambda n, h: n < 3, lambda n, h: (n + 1, h * w + 0.5), [mtf.reduce_sum(x).cast("int32") * 0, x], 5
    )


def _np_loop_until(x: np.ndarray, w: np.ndarray) -> Any:
    h = x
    for _ in range(3):
        h = h * w + 0.5
    return np.int32(3), h


CONTROL = (
    Sample(
        "custom_gradient",
        "control",
        _cubed,
        (Arg("a:8 b:4"), Arg("b:4 a:8")),
        lambda x, y: (x**3 * y.T, x - y.T),
    ),
    Sample(
        "cond",
        "control",
        lambda g, x, y: mtf.cond(mtf.reduce_sum(y) > 0.0, lambda: x * 2.0, lambda: x * y),
        (Arg("a:8 b:4"), Arg("b:4", "positive")),
        lambda x, y: 2 * x,
    ),
    Sample("while_loop", "control", _loop_until, (Arg("a:4 b:4"), Arg("b:4")), _np_loop_until),
)

LOOPS = (
    Sample(
        "scan",
        "loop",
        _stack,
        (Arg("a:4 b:4"), Arg("l:3 b:4 c:4")),
        _np_stack,
        together=("a b c",),
        loops=("l",),
    ),
    Sample("scan collects", "loop", _collect, (Arg("a:4 b:4"), Arg("l:3 b:4")), loops=("l",)),
    Sample(
        "scan in scan",
        "loop",
        _nested,
        (Arg("a:4 b:4"), Arg("l:3 b:4"), Arg("m:2 a:4 b:4")),
        _np_nested,
        loops=("l", "m"),
    ),
)

SAMPLES = (*SHAPE, *INDEX, *RANDOM, *CONTROL, *LOOPS)
