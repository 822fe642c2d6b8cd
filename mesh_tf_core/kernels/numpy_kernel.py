"""The kernel protocol in NumPy: the oracle that the other homes are tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np

from mesh_tf_core.ir.dtypes import FLOAT8
from mesh_tf_core.ir.kernel import LoopStep, WithoutLibraryKernels
from mesh_tf_core.kernels.array_kernel import ArrayKernel, Functions, libraries, np_dtype, wide

A = Any


def _special(name: str) -> Callable[[A], A]:
    """A function of scipy's, which is imported when it is called."""

    def function(x: A) -> A:
        from scipy import special

        return getattr(special, name)(x.astype(np.float64) if x.dtype != np.float32 else x).astype(x.dtype)

    return function


def _sigmoid(x: A) -> A:
    return (1.0 / (1.0 + np.exp(-np.clip(x, -80, 80)))).astype(x.dtype)


def _parts(ids: A, n: int) -> list[slice]:
    """The rows of each group, which lie together."""
    at = np.searchsorted(ids, np.arange(n + 1))
    return [slice(begin, end) for begin, end in pairwise(at)]


_UNARY: Functions = {
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "reciprocal": lambda x: (1 / x).astype(x.dtype),
    "sigmoid": _sigmoid,
    "erf": _special("erf"),
    "erfc": _special("erfc"),
    "relu": lambda x: np.maximum(x, np.zeros((), x.dtype)),
    "softplus": lambda x: np.logaddexp(np.zeros((), x.dtype), x),
    **dict.fromkeys(
        ("gelu", "gelu_fast", "gelu_new"),
        lambda x: (0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))).astype(x.dtype),
    ),
    "gelu_exact": lambda x: (0.5 * x * (1 + _special("erf")(x * 0.5**0.5))).astype(x.dtype),
    "silu": lambda x: x * _sigmoid(x),
}
_BINARY: Functions = {"div": lambda x, y: np.divide(x, y).astype(x.dtype)}


class NumpyKernel(WithoutLibraryKernels, ArrayKernel):
    """NumPy's implementation of `protocol.Kernel`."""

    compares = False
    xp = np
    of_one, of_two, joining = libraries(np, _UNARY, _BINARY)

    def quiet(self) -> AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    def einsum(self, spec: str, *xs: A) -> A:
        dtype = xs[0].dtype
        if dtype.name in FLOAT8:
            return np.einsum(spec, *(x.astype(np.float32) for x in xs), optimize=True)
        if dtype.itemsize == 2:
            return np.einsum(spec, *(x.astype(np.float32) for x in xs), optimize=True).astype(dtype)
        return np.asarray(np.einsum(spec, *xs, optimize=True))

    def conv(self, x: A, w: A, strides: Sequence[int], dilations: Sequence[int]) -> A:
        rank, dtype = len(strides), x.dtype
        if dtype.itemsize == 2:
            return self.conv(x.astype(np.float32), w.astype(np.float32), strides, dilations).astype(dtype)
        reach = [(k - 1) * d + 1 for k, d in zip(w.shape, dilations, strict=False)]
        sizes = [(n - r) // s + 1 for n, r, s in zip(x.shape[1:], reach, strides, strict=False)]
        out = np.zeros((x.shape[0], *sizes, w.shape[-1]), dtype)
        for tap in np.ndindex(*w.shape[:rank]):
            begin = [t * d for t, d in zip(tap, dilations, strict=True)]
            cut = [slice(b, b + (n - 1) * s + 1, s) for b, n, s in zip(begin, sizes, strides, strict=True)]
            out += x[(slice(None), *cut)] @ w[tap]
        return out

    def cumsum(self, x: A, axis: int, exclusive: bool, reverse: bool) -> A:
        x_ = np.moveaxis(np.flip(wide(x), axis) if reverse else wide(x), axis, 0)
        if exclusive:
            x_ = np.concatenate([np.zeros_like(x_[:1]), x_[:-1]])
        y = np.moveaxis(np.cumsum(x_, 0, dtype=x_.dtype), 0, axis).astype(x.dtype)
        return np.flip(y, axis) if reverse else y

    def argmax(self, x: A, axis: int) -> A:
        return np.argmax(wide(x), axis).astype(np.int32)

    def top_k(self, x: A, n: int) -> tuple[A, A]:
        # Both ways round, so that equal elements keep their order; NaN, last in NumPy's order, comes first.
        order = (x.shape[-1] - 1 - np.argsort(np.flip(wide(x), -1), axis=-1, kind="stable"))[..., ::-1][
            ..., :n
        ]
        return np.take_along_axis(x, order, -1), order.astype(np.int32)

    def slice(self, x: A, begin: Sequence[Any], sizes: Sequence[int]) -> A:
        return x[tuple(slice(int(b), int(b) + n) for b, n in zip(begin, sizes, strict=True))]

    def put(self, x: A, piece: A, axis: int, place: Any) -> A:
        out = np.array(x)
        np.moveaxis(out, axis, 0)[int(place)] = piece
        return out

    def add_at(self, x: A, values: A, ids: A, axis: int) -> A:
        place, out = np.expand_dims(ids, axis), np.array(x)
        np.put_along_axis(out, place, np.take_along_axis(x, place, axis) + np.expand_dims(values, axis), axis)
        return out

    def pad(self, x: A, paddings: Sequence[tuple[int, int]], value: float = 0.0) -> A:
        return np.pad(x, list(paddings), constant_values=value)

    def take(self, table: A, ids: A) -> A:
        return table[ids]

    def segment_sum(self, x: A, ids: A, n: int, most: bool = False) -> A:
        flat = ids.reshape(-1)
        rows = x.reshape((flat.size, *x.shape[ids.ndim :]))
        accumulate = np.float32 if x.dtype.itemsize == 2 else x.dtype
        out = np.full((n, *rows.shape[1:]), -np.inf if most else 0, accumulate)
        keep = flat >= 0
        (np.maximum if most else np.add).at(out, flat[keep], rows[keep].astype(accumulate))
        return out.astype(x.dtype)

    def grouped(self, x: A, w: A, ids: A, groups: int) -> A:
        if x.dtype.itemsize == 2:
            return self.grouped(wide(x), wide(w), ids, groups).astype(x.dtype)
        out = np.zeros((len(x), w.shape[2]), x.dtype)
        for part, matrix in zip(_parts(ids, len(w)), w, strict=True):
            out[part] = x[part] @ matrix
        return out

    def grouped_outer(self, x: A, y: A, ids: A, n: int, groups: int) -> A:
        if x.dtype.itemsize == 2:
            return self.grouped_outer(wide(x), wide(y), ids, n, groups).astype(x.dtype)
        return np.stack([x[part].T @ y[part] for part in _parts(ids, n)])

    def iota(self, n: int, dtype: str) -> A:
        return np.arange(n).astype(np_dtype(dtype))

    def cast(self, x: A, dtype: str) -> A:
        return np.asarray(x).astype(np_dtype(dtype))

    def loop(self, n: int, step: LoopStep, carried: Sequence[A]) -> tuple[list[A], list[A]]:
        state, parts = list(carried), []
        for i in range(n):
            state, made = step(i, state)
            parts.append(made)
        return state, [np.stack(same) for same in zip(*parts, strict=True)]
