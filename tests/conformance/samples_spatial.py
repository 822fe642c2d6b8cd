"""Samples: convolutions and pooling, with halos narrower and wider than a piece."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.ops.windows import padding
from tests.conformance.helper import Arg, Sample, dims

Pads = Any


def _geometry(sizes: Any, taps: Any, strides: Any, dilations: Any, pads: Pads) -> list[tuple[int, int]]:
    if not isinstance(pads, str):
        return list(pads)
    return [padding(pads, k, s, d, n) for n, k, s, d in zip(sizes, taps, strides, dilations, strict=False)]


def reference(x: np.ndarray, w: np.ndarray, strides: Any, dilations: Any, pads: Pads) -> np.ndarray:
    """x [n spatial in], w [taps in out], one output at a time."""
    rank = len(strides)
    ends = _geometry(x.shape[1:], w.shape, strides, dilations, pads)
    x = np.pad(x, [(0, 0), *ends, (0, 0)])
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape, dilations, strict=False)]
    counts = [(n - r) // s + 1 for n, r, s in zip(x.shape[1:], reach, strides, strict=False)]
    out = np.zeros((len(x), *counts, w.shape[-1]))
    for place in product(*map(range, counts)):
        for tap in np.ndindex(*w.shape[:rank]):
            at = tuple(p * s + t * d for p, s, t, d in zip(place, strides, tap, dilations, strict=True))
            out[(slice(None), *place)] += x[(slice(None), *at)] @ w[tap]
    return out


def transposed(
    y: np.ndarray, w: np.ndarray, sizes: Any, strides: Any, dilations: Any, pads: Pads
) -> np.ndarray:
    """The transpose of `reference`: every output back to the inputs that it looked at."""
    rank = len(strides)
    ends = _geometry(sizes, w.shape, strides, dilations, pads)
    x = np.zeros((len(y), *(n + a + b for n, (a, b) in zip(sizes, ends, strict=True)), w.shape[-2]))
    for place in np.ndindex(*y.shape[1 : 1 + rank]):
        for tap in np.ndindex(*w.shape[:rank]):
            at = tuple(p * s + t * d for p, s, t, d in zip(place, strides, tap, dilations, strict=True))
            x[(slice(None), *at)] += y[(slice(None), *place)] @ w[tap].T
    inner = tuple(slice(a, a + n) for n, (a, _) in zip(sizes, ends, strict=True))
    return x[(slice(None), *inner)]


def conv_sample(name: str, x: str, w: str, strides: Any, dilations: Any, pads: Pads) -> Sample:
    """x: batch, spatial dimensions, `in`; w: taps, `in`, `out`."""
    spatial, taps = dims(x)[1:-1], dims(w)[:-2]
    return Sample(
        name,
        "spatial",
        lambda g, x, w: mtf.conv(
            x, w, spatial, taps, mtf.Dim("in", w.dim("in").size), strides, dilations, pads
        ),
        (Arg(x), Arg(w)),
        lambda x, w: reference(x, w, strides, dilations, pads),
        together=("n h i d in out",),
    )


def transpose_sample(
    name: str, y: str, w: str, sizes: str, strides: Any, dilations: Any, pads: Pads
) -> Sample:
    spatial, taps = dims(sizes), dims(w)[:-2]
    return Sample(
        name,
        "spatial",
        lambda g, y, w: mtf.conv_transpose(
            y, w, spatial, taps, mtf.Dim("in", w.dim("in").size), strides, dilations, pads
        ),
        (Arg(y), Arg(w)),
        lambda y, w: transposed(y, w, [d.size for d in spatial], strides, dilations, pads),
        together=("n h i d in out",),
    )


def pooled(x: np.ndarray, fn: Any, sizes: Any, strides: Any, pads: Pads) -> np.ndarray:
    """x [n spatial c]; `fn` over the elements of each window that are not padding."""
    ends = _geometry(x.shape[1:], sizes, strides, [1] * len(sizes), pads)
    x = np.pad(x, [(0, 0), *ends, (0, 0)], constant_values=np.nan)
    counts = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:], sizes, strides, strict=False)]
    out = np.zeros((len(x), *counts, x.shape[-1]))
    for place in product(*map(range, counts)):
        cut = tuple(slice(p * s, p * s + k) for p, s, k in zip(place, strides, sizes, strict=True))
        window = x[(slice(None), *cut)]
        out[(slice(None), *place)] = fn(window.reshape(len(x), -1, x.shape[-1]), axis=1)
    return out


def pool_sample(name: str, fn: str, x: str, sizes: Any, strides: Any, pads: Pads) -> Sample:
    spatial = dims(x)[1:-1]
    pool = {"max": mtf.max_pool, "sum": mtf.sum_pool, "avg": mtf.avg_pool}[fn]
    plain = {"max": np.nanmax, "sum": np.nansum, "avg": np.nanmean}[fn]
    return Sample(
        name,
        "spatial",
        lambda g, x: pool(x, spatial, sizes, strides, pads),
        (Arg(x),),
        lambda x: pooled(x, plain, sizes, strides, pads),
    )


def grouped(x: np.ndarray, w: np.ndarray, strides: Any, dilations: Any, pads: Pads) -> np.ndarray:
    """x [g n spatial in], w [g taps in out]: every group for itself, [n spatial g out]."""
    parts = [reference(a, b, strides, dilations, pads) for a, b in zip(x, w, strict=True)]
    return np.stack(parts, -2)


GROUPED = (
    Sample(
        "conv grouped",
        "spatial",
        lambda g, x, w: mtf.conv(
            x, w, dims("h:8"), dims("k:3"), mtf.Dim("in", 2), 2, groups=[mtf.Dim("g", 2)]
        ),
        (Arg("n:2 g:2 h:8 in:2"), Arg("k:3 g:2 in:2 out:2")),
        lambda x, w: grouped(np.moveaxis(x, 1, 0), np.moveaxis(w, 1, 0), [2], [1], "same"),
        together=("n g h in out",),
    ),
    Sample(
        "conv depthwise",
        "spatial",
        lambda g, x, w: mtf.conv(x, w, dims("h:8 i:4"), dims("k:3 l:2"), None, 1, [2, 1], groups=dims("c:4")),
        (Arg("n:1 h:8 i:4 c:4"), Arg("k:3 c:4 l:2")),
        lambda x, w: grouped(
            np.moveaxis(x, -1, 0)[..., None], np.moveaxis(w, 1, 0)[..., None, None], [1, 1], [2, 1], "same"
        )[..., 0],
    ),
    Sample(
        "conv multiplied depthwise",
        "spatial",
        lambda g, x, w: mtf.conv(x, w, dims("h:8"), dims("k:3"), None, groups=dims("c:2")),
        (Arg("h:8 c:2"), Arg("m:2 k:3 c:2")),
        lambda x, w: grouped(
            x.T[:, None, :, None], np.einsum("mkc->ckm", w)[:, :, None, :], [1], [1], "same"
        )[0],
        together=("h c m",),
    ),
    Sample(
        "conv_transpose depthwise",
        "spatial",
        lambda g, y, w: mtf.conv_transpose(y, w, dims("h:16"), dims("k:3"), None, 2, groups=dims("c:2")),
        (Arg("n:2 h:8 c:2"), Arg("k:3 c:2")),
        lambda y, w: np.concatenate(
            [transposed(y[..., [i]], w[:, [i], None], [16], [2], [1], "same") for i in range(2)], -1
        ),
    ),
)

CONV = (
    conv_sample("conv 1d", "n:2 h:8 in:2", "kh:3 in:2 out:2", [1], [1], "same"),
    conv_sample("conv 1d wide", "n:2 h:8 in:2", "kh:7 in:2 out:2", [1], [1], "same"),
    conv_sample("conv 1d even", "n:2 h:8 in:2", "kh:4 in:2 out:2", [1], [1], "same"),
    conv_sample("conv 1d stride", "n:2 h:16 in:2", "kh:3 in:2 out:2", [2], [1], "same"),
    conv_sample("conv 1d stride wide", "n:2 h:16 in:2", "kh:5 in:2 out:2", [2], [1], "same"),
    conv_sample("conv 1d skips", "n:2 h:16 in:2", "kh:1 in:2 out:2", [2], [1], "valid"),
    conv_sample("conv 1d dilated", "n:2 h:8 in:2", "kh:3 in:2 out:2", [1], [3], "same"),
    conv_sample("conv 1d stride dilated", "n:2 h:16 in:2", "kh:3 in:2 out:2", [2], [2], "same"),
    conv_sample("conv 1d valid", "n:2 h:10 in:2", "kh:3 in:2 out:2", [1], [1], "valid"),
    conv_sample("conv 1d causal", "n:2 h:8 in:2", "kh:3 in:2 out:2", [1], [2], [(4, 0)]),
    conv_sample("conv 2d", "n:2 h:4 i:4 in:2", "kh:3 ki:3 in:2 out:2", [1, 1], [1, 1], "same"),
    conv_sample("conv 2d mixed", "n:2 h:8 i:4 in:2", "kh:3 ki:2 in:2 out:2", [2, 1], [1, 2], "same"),
    conv_sample("conv 3d", "n:1 h:4 i:4 d:2 in:2", "kh:3 ki:2 kd:2 in:2 out:1", [1, 2, 1], [1, 1, 1], "same"),
    Sample(
        "conv many outs",
        "spatial",
        lambda g, x, w: mtf.conv(x, w, dims("h:8"), dims("k:3"), mtf.Dim("in", 2)),
        (Arg("in:2 m:2 h:8 n:2"), Arg("o:2 k:3 p:2 in:2")),
        lambda x, w: np.einsum(
            "mnhop->mnhop",
            reference(
                x.transpose(1, 3, 2, 0).reshape(4, 8, 2),
                w.transpose(1, 3, 0, 2).reshape(3, 2, 4),
                [1],
                [1],
                "same",
            ).reshape(2, 2, 8, 2, 2),
        ),
        together=("m n h in o p",),
    ),
)

TRANSPOSE = (
    transpose_sample("conv_transpose 1d", "n:2 h:8 out:2", "kh:3 in:2 out:2", "h:16", [2], [1], "same"),
    transpose_sample("conv_transpose 1d wide", "n:2 h:4 out:2", "kh:5 in:2 out:2", "h:8", [2], [1], "same"),
    transpose_sample(
        "conv_transpose 1d valid", "n:2 h:8 out:2", "kh:2 in:2 out:2", "h:16", [2], [1], "valid"
    ),
    transpose_sample(
        "conv_transpose 2d", "n:1 h:4 i:4 out:2", "kh:3 ki:3 in:2 out:2", "h:8 i:4", [2, 1], [1, 1], "same"
    ),
)

POOL = (
    pool_sample("max_pool", "max", "n:2 h:16 c:2", [2], [2], "valid"),
    pool_sample("max_pool overlaps", "max", "n:2 h:16 c:2", [3], [2], "same"),
    pool_sample("max_pool wide", "max", "n:2 h:8 c:2", [5], [1], "same"),
    pool_sample("max_pool 2d", "max", "n:1 h:8 i:4 c:2", [3, 2], [2, 2], "same"),
    pool_sample("sum_pool", "sum", "n:2 h:8 c:2", [3], [1], "same"),
    pool_sample("avg_pool", "avg", "n:2 h:16 c:2", [3], [2], "same"),
    pool_sample("avg_pool 3d", "avg", "n:1 h:4 i:2 d:4 c:1", [2, 1, 2], [2, 1, 2], "valid"),
)

SAMPLES = (*CONV, *GROUPED, *TRANSPOSE, *POOL)
