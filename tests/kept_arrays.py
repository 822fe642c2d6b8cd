"""Small models with an array `other` of every kind that stays between steps, in each of their layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.optimizers import by_name
from mesh_tf_core.tracing.graph import graph_of

BATCH, D, F, LAYERS = mtf.Dim("batch", 8), mtf.Dim("d", 8), mtf.Dim("f", 16), mtf.Dim("layers", 3)

AFTER = "moving average of all layers"
"""It has its new value outside of the loop."""


def _variable(g: mtf.Graph, dims: list[mtf.Dim], dtype: str, trainable: bool = False) -> mtf.Tensor:
    return g.variable("other", dims, mtf.Normal(0.3), dtype, trainable=trainable)


def _trained(g: mtf.Graph, h: mtf.Tensor, y: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    return mtf.einsum([y, _variable(g, [F, D], h.dtype, trainable=True)], [BATCH, D])


def _frozen(g: mtf.Graph, h: mtf.Tensor, y: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    return mtf.einsum([y, _variable(g, [F, D], h.dtype)], [BATCH, D])


def _in_half(g: mtf.Graph, h: mtf.Tensor, y: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    return mtf.einsum([y, _variable(g, [F, D], "bfloat16").cast(h.dtype)], [BATCH, D])


def _statistics(g: mtf.Graph, h: mtf.Tensor, y: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    mean = _variable(g, [F], h.dtype)
    g.assign(g.lookup("other"), mean * 0.9 + mtf.stop_gradient(mtf.reduce_mean(y, "batch")) * 0.1)
    return mtf.einsum([y - mean, w], [BATCH, D])


def _unread(g: mtf.Graph, h: mtf.Tensor, y: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    _variable(g, [F], h.dtype)
    g.assign(g.lookup("other"), mtf.stop_gradient(mtf.reduce_mean(y, "batch")))
    return mtf.einsum([y, w], [BATCH, D])


def _average(g: mtf.Graph, h: mtf.Tensor, y: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    average = _variable(g, [D, F], h.dtype)
    g.assign(g.lookup("other"), average * 0.9 + mtf.stop_gradient(w) * 0.1)
    return mtf.einsum([mtf.tanh(mtf.einsum([h, average], [BATCH, F])) - y, w], [BATCH, D])


def _behind_stops(g: mtf.Graph, h: mtf.Tensor, y: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    stopped = mtf.stop_gradient(mtf.stop_gradient(_variable(g, [F, D], "bfloat16")).cast(h.dtype))
    return mtf.einsum([y, stopped], [BATCH, D])


def _after(g: mtf.Graph, h: mtf.Tensor, y: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
    average = _variable(g, [D, F], h.dtype)
    return mtf.einsum([mtf.tanh(mtf.einsum([h, average], [BATCH, F])) - y, w], [BATCH, D])


KINDS: dict[str, Callable[..., mtf.Tensor]] = {
    "trained": _trained,
    "frozen": _frozen,
    "frozen in half precision": _in_half,
    "frozen behind stop_gradient": _behind_stops,
    "running statistics": _statistics,
    "statistics that are only written": _unread,
    "moving average": _average,
    AFTER: _after,
}
"""How a layer uses `other`: g, its input, its hidden values, its trained weight."""


def model(kind: str, dtype: str = "float64", layers: mtf.Dim = LAYERS) -> mtf.Model:
    g = mtf.Graph(kind)

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        w = g.variable("w", [D, F], mtf.Normal(0.3), dtype)
        y = mtf.tanh(mtf.einsum([h, w], [BATCH, F]))
        return h + KINDS[kind](g, h, y, w)

    h = mtf.scan(layer, g.input("x", [BATCH, D], dtype), layers)
    if kind == AFTER:
        trained, average = (graph_of(h).read(graph_of(h).variables[n]) for n in ("w", "other"))
        graph_of(h).assign(graph_of(h).variables["other"], average * 0.9 + mtf.stop_gradient(trained) * 0.1)
    return mtf.Model(mtf.reduce_mean(mtf.square(h)), by_name("adam", 0.01), name=kind)


def batch(dtype: str = "float64") -> dict[str, np.ndarray]:
    return {"x": np.linspace(-1, 1, BATCH.size * D.size, dtype=dtype).reshape(BATCH.size, D.size)}
