"""The kernel protocol in NumPy: the oracle that the other homes are tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mesh_tf_core.ir.dtypes import FLOAT8
from mesh_tf_core.ir.kernel import Attending, Edge, Step

A = Any


def np_dtype(dtype: str) -> Any:
    """NumPy's dtype for a dtype name (bfloat16 and float8 from ml_dtypes)."""
    if dtype == "bfloat16" or dtype in FLOAT8:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)


def _wide(x: A) -> A:
    """x with sums in mind: those of 16 bits would lose small terms."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def _erf(x: A) -> A:
    from scipy.special import erf

    return erf(x.astype(np.float64) if x.dtype != np.float32 else x).astype(x.dtype)


def _sigmoid(x: A) -> A:
    return (1.0 / (1.0 + np.exp(-np.clip(x, -80, 80)))).astype(x.dtype)


def _parts(ids: A, n: int) -> list[slice]:
    """The rows of each group, which lie together."""
    at = np.searchsorted(ids, np.arange(n + 1))
    return [slice(begin, end) for begin, end in pairwise(at)]


_UNARY: dict[str, Callable[[A], A]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "square": np.square,
    "reciprocal": lambda x: (1 / x).astype(x.dtype),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "erf": _erf,
    "floor": np.floor,
    "relu": lambda x: np.maximum(x, np.zeros((), x.dtype)),
    "softplus": lambda x: np.logaddexp(np.zeros((), x.dtype), x),
    "gelu": lambda x: (0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))).astype(
        x.dtype
    ),
    "silu": lambda x: x * _sigmoid(x),
    "not": np.logical_not,
    "is_finite": np.isfinite,
}
_BINARY: dict[str, Callable[[A, A], A]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda x, y: np.divide(x, y).astype(x.dtype),
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "mod": np.mod,
    "floordiv": np.floor_divide,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "bit_xor": np.bitwise_xor,
    "bit_and": np.bitwise_and,
    "shift_right": np.right_shift,
}
_REDUCE: dict[str, Callable[..., A]] = {
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "all": np.all,
    "any": np.any,
}


class NumpyKernel:
    """NumPy's implementation of `protocol.Kernel`."""

    compares = False

    def unary(self, fn: str, x: A) -> A:
        with np.errstate(all="ignore"):
            return _UNARY[fn](x)

    def binary(self, fn: str, x: A, y: A) -> A:
        with np.errstate(all="ignore"):
            return _BINARY[fn](x, y)

    def where(self, condition: A, x: A, y: A) -> A:
        return np.where(condition, x, y)

    def reduce(self, fn: str, x: A, axes: Sequence[int]) -> A:
        if fn == "sum" and x.dtype.itemsize == 2:
            return x.astype(np.float32).sum(tuple(axes)).astype(x.dtype)
        return np.asarray(_REDUCE[fn](x, axis=tuple(axes))).astype(x.dtype)

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

    def padded_conv(
        self, x: A, w: A, strides: Sequence[int], dilations: Sequence[int], edges: Sequence[Edge]
    ) -> None:
        return None

    def softmax(self, x: A, axis: int) -> A:
        wide = _wide(x)
        with np.errstate(all="ignore"):
            e = np.exp(wide - wide.max(axis, keepdims=True))
            return (e / e.sum(axis, keepdims=True)).astype(x.dtype)

    def logsumexp(self, x: A, axis: int) -> A:
        wide = _wide(x)
        top = wide.max(axis, keepdims=True)
        with np.errstate(all="ignore"):
            # Of infinities nothing can be subtracted; then the sum is one, or nothing.
            top = np.where(np.isfinite(top), top, np.zeros((), wide.dtype))
            total = top + np.log(np.exp(wide - top).sum(axis, keepdims=True))
        return total.squeeze(axis).astype(x.dtype)

    def exp_less(self, x: A, total: A, axis: int, own: bool) -> A:
        with np.errstate(all="ignore"):
            return np.exp(_wide(x) - _wide(total)).astype(x.dtype)

    def cumsum(self, x: A, axis: int, exclusive: bool, reverse: bool) -> A:
        wide = np.moveaxis(np.flip(_wide(x), axis) if reverse else _wide(x), axis, 0)
        if exclusive:
            wide = np.concatenate([np.zeros_like(wide[:1]), wide[:-1]])
        y = np.moveaxis(np.cumsum(wide, 0, dtype=wide.dtype), 0, axis).astype(x.dtype)
        return np.flip(y, axis) if reverse else y

    def argmax(self, x: A, axis: int) -> A:
        return np.argmax(_wide(x), axis).astype(np.int32)

    def top_k(self, x: A, n: int) -> tuple[A, A]:
        # Both ways round, so that equal elements keep their order; NaN, last in NumPy's order, comes first.
        order = (x.shape[-1] - 1 - np.argsort(np.flip(_wide(x), -1), axis=-1, kind="stable"))[..., ::-1][
            ..., :n
        ]
        return np.take_along_axis(x, order, -1), order.astype(np.int32)

    def reshape(self, x: A, shape: Sequence[int]) -> A:
        return np.reshape(x, tuple(shape))

    def transpose(self, x: A, permutation: Sequence[int]) -> A:
        return np.transpose(x, tuple(permutation))

    def broadcast_to(self, x: A, shape: Sequence[int]) -> A:
        return np.broadcast_to(x, tuple(shape))

    def concat(self, xs: Sequence[A], axis: int) -> A:
        return np.concatenate(list(xs), axis)

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

    def flip(self, x: A, axis: int) -> A:
        return np.flip(x, axis)

    def take(self, table: A, ids: A) -> A:
        return table[ids]

    def segment_sum(self, x: A, ids: A, n: int) -> A:
        flat = ids.reshape(-1)
        rows = x.reshape((flat.size, *x.shape[ids.ndim :]))
        accumulate = np.float32 if x.dtype.itemsize == 2 else x.dtype
        out = np.zeros((n, *rows.shape[1:]), accumulate)
        keep = flat >= 0
        np.add.at(out, flat[keep], rows[keep].astype(accumulate))
        return out.astype(x.dtype)

    def grouped(self, x: A, w: A, ids: A, groups: int) -> A:
        if x.dtype.itemsize == 2:
            return self.grouped(_wide(x), _wide(w), ids, groups).astype(x.dtype)
        out = np.zeros((len(x), w.shape[2]), x.dtype)
        for part, matrix in zip(_parts(ids, len(w)), w, strict=True):
            out[part] = x[part] @ matrix
        return out

    def grouped_outer(self, x: A, y: A, ids: A, n: int, groups: int) -> A:
        if x.dtype.itemsize == 2:
            return self.grouped_outer(_wide(x), _wide(y), ids, n, groups).astype(x.dtype)
        return np.stack([x[part].T @ y[part] for part in _parts(ids, n)])

    def full(self, shape: Sequence[int], value: float, dtype: str) -> A:
        return np.full(tuple(shape), value, np_dtype(dtype))

    def iota(self, n: int, dtype: str) -> A:
        return np.arange(n).astype(np_dtype(dtype))

    def array(self, values: Any, dtype: str) -> A:
        return np.asarray(values, np_dtype(dtype))

    def cast(self, x: A, dtype: str) -> A:
        return np.asarray(x).astype(np_dtype(dtype))

    def scalar(self, value: Any, dtype: str) -> A:
        return np.asarray(value).astype(np_dtype(dtype))

    def together(self, fn: Callable[..., A], *xs: A) -> A:
        return fn(self, *xs)

    def loop(self, n: int, step: Step, carried: Sequence[A]) -> tuple[list[A], list[A]]:
        state, parts = list(carried), []
        for i in range(n):
            state, made = step(i, state)
            parts.append(made)
        return state, [np.stack(same) for same in zip(*parts, strict=True)]

    def attention(self, a: Attending) -> None:
        return None

    def attention_gradient(self, a: Attending, result: A, lse: A, dresult: A) -> None:
        return None
