"""The kernel protocol in TensorFlow, which this module imports: engines import it when they are opened."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tf_core.ir.dtypes import FLOAT8
from mesh_tf_core.ir.kernel import BINARY, REDUCE, UNARY, LoopStep, WithoutLibraryKernels
from mesh_tf_core.kernels.array_kernel import library
from mesh_tf_core.kernels.contraction import ContractionOperand, MatMul, PairwiseEinsum

T = Any


def _matrix(
    x: T, factor: ContractionOperand, batch: str, left: str, right: str, sizes: Mapping[str, int]
) -> T:
    """One factor as [batch left right], or [batch right left] if it lies transposed."""
    many, m, n = (math.prod(sizes[c] for c in part) for part in (batch, left, right))
    return tf.reshape(x, [*([many] if batch else []), *((n, m) if factor.transposed else (m, n))])


def grouped(x: T, w: T, ids: T) -> T:
    """`Kernel.grouped`: one product for each group."""
    n, rows, made = w.shape[0], x.shape[0], w.shape[2]
    at = _bounds(ids, n)
    parts = [tf.matmul(x[at[i] : at[i + 1]], w[i]) for i in range(n)]
    ends = (tf.zeros((size, made), x.dtype) for size in (at[0], rows - at[n]))
    return tf.ensure_shape(tf.concat([next(ends), *parts, next(ends)], 0), (rows, made))


def grouped_outer(x: T, y: T, ids: T, n: int) -> T:
    """`Kernel.grouped_outer`: one product for each group."""
    at = _bounds(ids, n)
    return tf.stack(
        [tf.matmul(x[at[i] : at[i + 1]], y[at[i] : at[i + 1]], transpose_a=True) for i in range(n)]
    )


def _bounds(ids: T, n: int) -> Sequence[T]:
    """Where the rows of each group begin, and where the last one's end."""
    return tf.unstack(tf.searchsorted(ids, tf.range(n + 1, dtype=ids.dtype)))


_MATMUL_DTYPES = (tf.float32, tf.float64, tf.bfloat16, tf.float16, tf.int32, tf.int64)
_UNSIGNED = (tf.uint32,)


def _floating(fn: Callable[[T], T], other: Callable[[T], T]) -> Callable[[T], T]:
    """`fn` for floating-point tensors, `other` for the rest."""
    return lambda x: fn(x) if x.dtype.is_floating else other(x)


def _gelu(x: T) -> T:
    inner = (x + x * x * x * _like(0.044715, x)) * _like(math.sqrt(2 / math.pi), x)
    return x * (tf.tanh(inner) + _like(1.0, x)) * _like(0.5, x)


def _like(value: float, x: T) -> T:
    return tf.constant(value, x.dtype)


def _int_divide(x: T, y: T) -> T:
    return tf.cast(tf.truediv(tf.cast(x, tf.float64), tf.cast(y, tf.float64)), x.dtype)


_UNARY = library(
    tf,
    {fn: row.tensorflow for fn, row in UNARY.items()},
    {
        "neg": lambda x: tf.zeros((), x.dtype) - x if x.dtype in _UNSIGNED else tf.negative(x),
        "abs": lambda x: x if x.dtype in _UNSIGNED else tf.abs(x),
        "sign": lambda x: tf.cast(x != 0, x.dtype) if x.dtype in _UNSIGNED else tf.sign(x),
        "square": lambda x: x * x,
        "reciprocal": _floating(tf.math.reciprocal, lambda x: _int_divide(tf.ones_like(x), x)),
        "floor": _floating(tf.floor, lambda x: x),
        "relu": lambda x: tf.maximum(x, tf.zeros((), x.dtype)) if x.dtype in _UNSIGNED else tf.nn.relu(x),
        **dict.fromkeys(("gelu", "gelu_fast", "gelu_new"), _gelu),
        "gelu_exact": lambda x: x * (tf.math.erf(x * _like(0.5**0.5, x)) + _like(1.0, x)) * _like(0.5, x),
        "silu": lambda x: x * tf.sigmoid(x),
        "is_finite": _floating(tf.math.is_finite, lambda x: tf.ones_like(x, tf.bool)),
    },
)
_BINARY = library(
    tf,
    {fn: row.tensorflow for fn, row in BINARY.items()},
    {"div": lambda x, y: tf.divide(x, y) if x.dtype.is_floating else _int_divide(x, y)},
)
_REDUCE = library(tf, {fn: row.tensorflow for fn, row in REDUCE.items()}, {})
_VIA_INT32 = frozenset(["lt", "le", "gt", "ge", "max", "min"])
"""Functions of bool that TensorFlow only has for numbers."""
_VIA_INT64 = frozenset(["mod", "floordiv", "pow"])
"""Functions of uint32 that TensorFlow only has for signed numbers; 64 bits hold every operand."""
_TOGETHER: dict[Callable[..., T], Callable[..., T]] = {}
"""Compiled functions of `TfKernel.together`."""


class TfKernel(WithoutLibraryKernels, PairwiseEinsum):
    """TensorFlow's implementation of `protocol.Kernel`, for traced functions and eager tensors."""

    compares = False

    def unary(self, fn: str, x: T) -> T:
        return _UNARY[fn](x)

    def binary(self, fn: str, x: T, y: T) -> T:
        if fn in _VIA_INT32 and x.dtype == tf.bool:
            out = _BINARY[fn](tf.cast(x, tf.int32), tf.cast(y, tf.int32))
            return tf.cast(out, tf.bool)
        if fn in _VIA_INT64 and x.dtype == tf.uint32:
            return tf.cast(_BINARY[fn](tf.cast(x, tf.int64), tf.cast(y, tf.int64)), tf.uint32)
        return _BINARY[fn](x, y)

    def where(self, condition: T, x: T, y: T) -> T:
        return tf.where(condition, x, y)

    def reduce(self, fn: str, x: T, axes: Sequence[int]) -> T:
        return _REDUCE[fn](x, axis=list(axes)) if len(axes) else x

    def einsum(self, spec: str, *xs: T) -> T:
        if xs[0].dtype.name in FLOAT8:
            xs = tuple(tf.cast(x, tf.float32) for x in xs)
        if xs[0].dtype not in _MATMUL_DTYPES:
            return self._einsum_as_integers(spec, *xs)
        return self.contracted(spec, *xs)

    def product(self, a: T, b: T, plan: MatMul, sizes: Mapping[str, int]) -> T:
        a = _matrix(a, plan.first, plan.batch, plan.rows, plan.summed, sizes)
        b = _matrix(b, plan.second, plan.batch, plan.summed, plan.columns, sizes)
        c = tf.matmul(a, b, transpose_a=plan.first.transposed, transpose_b=plan.second.transposed)
        return tf.reshape(c, [sizes[letter] for letter in plan.result])

    def _einsum_as_integers(self, spec: str, *xs: T) -> T:
        """uint32 wraps like the low half of int64; bool is 'any of all'."""
        out = self.einsum(spec, *(tf.cast(x, tf.int64) for x in xs))
        return out > 0 if xs[0].dtype == tf.bool else tf.cast(out, xs[0].dtype)

    def conv(self, x: T, w: T, strides: Sequence[int], dilations: Sequence[int]) -> T:
        apart = max(strides) > 1 and max(dilations) > 1
        # TensorFlow has no convolution with both: every output is computed, then those wanted are taken.
        steps = [1] * len(strides) if apart else list(strides)
        y = tf.nn.convolution(x, w, strides=steps, padding="VALID", dilations=list(dilations))
        return y[(slice(None), *(slice(None, None, s) for s in strides))] if apart else y

    def softmax(self, x: T, axis: int) -> T:
        if x.dtype.size == 2:
            return tf.cast(self.softmax(tf.cast(x, tf.float32), axis), x.dtype)
        if axis in (-1, len(x.shape) - 1):
            if len(x.shape) < 6:
                return tf.nn.softmax(x)
            # On CPUs it takes at most five dimensions.
            return tf.reshape(tf.nn.softmax(tf.reshape(x, (-1, x.shape[-1]))), x.shape)
        e = tf.exp(x - tf.reduce_max(x, axis, keepdims=True))
        return e / tf.reduce_sum(e, axis, keepdims=True)

    def logsumexp(self, x: T, axis: int) -> T:
        if x.dtype.size == 2:
            return tf.cast(self.logsumexp(tf.cast(x, tf.float32), axis), x.dtype)
        top = tf.reduce_max(x, axis, keepdims=True)
        if axis in (-1, len(x.shape) - 1):
            # The softmax of the largest element is 1 / sum(exp(x - top)); on CPUs softmax is one pass.
            flat = tf.reshape(top, top.shape[:-1])
            found = flat - tf.math.log(tf.reduce_max(self.softmax(x, axis), axis))
            # Of infinities nothing can be subtracted; then the sum is one, or nothing.
            return tf.where(tf.math.is_inf(flat), flat, found)
        top = tf.where(tf.math.is_finite(top), top, tf.zeros((), top.dtype))
        total = tf.math.log(tf.reduce_sum(tf.exp(x - top), axis))
        return total + tf.reshape(top, total.shape)

    def exp_less(self, x: T, total: T, axis: int, own: bool) -> T:
        if own:
            return self.softmax(x, axis)
        if x.dtype.size == 2:
            return tf.cast(tf.exp(tf.cast(x, tf.float32) - tf.cast(total, tf.float32)), x.dtype)
        return tf.exp(x - total)

    def cumsum(self, x: T, axis: int, exclusive: bool, reverse: bool) -> T:
        if x.dtype == tf.uint32:
            wide = tf.cumsum(tf.cast(x, tf.int64), axis, exclusive, reverse)
            return tf.cast(wide, tf.uint32)
        if x.dtype.size == 2:
            return tf.cast(tf.cumsum(tf.cast(x, tf.float32), axis, exclusive, reverse), x.dtype)
        return tf.cumsum(x, axis, exclusive, reverse)

    def argmax(self, x: T, axis: int) -> T:
        return tf.argmax(_places(x), axis, output_type=tf.int32)

    def top_k(self, x: T, n: int) -> tuple[T, T]:
        if not x.dtype.is_floating:
            return tuple(tf.math.top_k(x, n))
        found = tf.math.top_k(_places(x), n).indices
        return tf.gather(x, found, batch_dims=len(x.shape) - 1), found

    def reshape(self, x: T, shape: Sequence[int]) -> T:
        return x if tuple(x.shape) == tuple(shape) else tf.reshape(x, list(shape))

    def transpose(self, x: T, permutation: Sequence[int]) -> T:
        moved = [p for p in permutation if x.shape[p] != 1]
        if moved == sorted(moved):
            return self.reshape(x, [x.shape[p] for p in permutation])
        return tf.transpose(x, list(permutation))

    def broadcast_to(self, x: T, shape: Sequence[int]) -> T:
        return x if tuple(x.shape) == tuple(shape) else tf.broadcast_to(x, list(shape))

    def concat(self, xs: Sequence[T], axis: int) -> T:
        return tf.concat(list(xs), axis) if len(xs) > 1 else xs[0]

    def slice(self, x: T, begin: Sequence[Any], sizes: Sequence[int]) -> T:
        if tuple(x.shape) == tuple(sizes):
            return x
        return tf.slice(x, list(begin), list(sizes))

    def put(self, x: T, piece: T, axis: int, place: Any) -> T:
        sizes = x.shape.as_list()
        rows, inner = math.prod(sizes[:axis]), sizes[axis + 1 :]
        first = tf.range(rows) * sizes[axis] + tf.cast(place, tf.int32)
        flat = tf.reshape(x, [rows * sizes[axis], *inner])
        flat = tf.tensor_scatter_nd_update(flat, first[:, None], tf.reshape(piece, [rows, *inner]))
        return tf.reshape(flat, sizes)

    def add_at(self, x: T, values: T, ids: T, axis: int) -> T:
        shape = x.shape.as_list()
        outer, n, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        wide = tf.int32 if outer * n * inner < 2**31 else tf.int64
        rest = tf.range(outer * inner, dtype=wide)
        place = (rest // inner * n + tf.reshape(tf.cast(ids, wide), [-1])) * inner + rest % inner
        # tf.tensor_scatter_nd_add always copies x on CPUs; this does only where something else reads it.
        found = tf.raw_ops.ScatterNdNonAliasingAdd(
            input=tf.reshape(x, [-1]), indices=place[:, None], updates=tf.reshape(values, [-1])
        )
        return tf.reshape(found, shape)

    def pad(self, x: T, paddings: Sequence[tuple[int, int]], value: float = 0.0) -> T:
        return tf.pad(x, list(paddings), constant_values=self.scalar(value, x.dtype.name))

    def flip(self, x: T, axis: int) -> T:
        return tf.reverse(x, [axis])

    def take(self, table: T, ids: T) -> T:
        return tf.gather(table, ids)

    def segment_sum(self, x: T, ids: T, n: int, most: bool = False) -> T:
        small = x.dtype.size == 2
        made = tf.math.unsorted_segment_max if most else tf.math.unsorted_segment_sum
        out = made(tf.cast(x, tf.float32) if small else x, ids, n)
        return tf.cast(out, x.dtype) if small else out

    def grouped(self, x: T, w: T, ids: T, groups: int) -> T:
        return grouped(x, w, ids)

    def grouped_outer(self, x: T, y: T, ids: T, n: int, groups: int) -> T:
        return grouped_outer(x, y, ids, n)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> T:
        return tf.fill(list(shape), self.scalar(value, dtype)) if len(shape) else self.scalar(value, dtype)

    def iota(self, n: int, dtype: str) -> T:
        return tf.cast(tf.range(n), dtype)

    def array(self, values: Any, dtype: str) -> T:
        wanted = tf.as_dtype(dtype)
        return tf.constant(np.asarray(values, wanted.as_numpy_dtype), wanted)

    def cast(self, x: T, dtype: str) -> T:
        x = tf.convert_to_tensor(x)
        wanted = tf.as_dtype(dtype)
        if x.dtype == wanted:
            return x
        if wanted == tf.bool:
            return tf.not_equal(x, tf.zeros((), x.dtype))
        return tf.cast(x, wanted)

    def scalar(self, value: Any, dtype: str) -> T:
        if isinstance(value, tf.Tensor):
            return self.cast(value, dtype)
        wanted = tf.as_dtype(dtype)
        return tf.constant(np.asarray(value).astype(wanted.as_numpy_dtype), wanted)

    def together(self, fn: Callable[..., T], *xs: T) -> T:
        if fn not in _TOGETHER:
            # Once for all devices, which then share what is compiled.
            _TOGETHER[fn] = tf.function(partial(fn, TfKernel()), autograph=False, jit_compile=True)
        return _TOGETHER[fn](*xs)

    def loop(self, n: int, step: LoopStep, carried: Sequence[T]) -> tuple[list[T], list[T]]:
        made: list[T] = []

        def example(*state: T) -> list[T]:
            made[:] = step(tf.constant(0), state)[1]
            return made

        specs = [tf.TensorSpec(x.shape, x.dtype) for x in carried]
        types = tf.function(example, autograph=False).get_concrete_function(*specs).outputs

        def body(i: T, state: Sequence[T], stacks: Sequence[T]) -> tuple[T, list[T], list[T]]:
            state, parts = step(i, state)
            return i + 1, list(state), [s.write(i, x) for s, x in zip(stacks, parts, strict=True)]

        stacks = [tf.TensorArray(x.dtype, n, element_shape=x.shape) for x in types]
        start = tf.constant(0), list(carried), stacks
        _, state, stacks = tf.while_loop(
            lambda i, *_: i < n, body, start, parallel_iterations=1, maximum_iterations=n
        )
        return list(state), [s.stack() for s in stacks]


def _places(x: T) -> T:
    """Whole numbers in the order of x, NaN the largest: TensorFlow has no order of NaN."""
    if not x.dtype.is_floating:
        return tf.cast(x, tf.int32) if x.dtype == tf.bool else x
    x = tf.cast(x, tf.float32) if x.dtype.size == 2 else x
    kind = tf.int32 if x.dtype.size == 4 else tf.int64
    bits = tf.bitcast(x, kind)
    # Of negative numbers, larger bits are smaller numbers; -0.0 is 0.0.
    bits = tf.where(bits < 0, kind.min - bits, bits)
    return tf.where(tf.math.is_nan(x), kind.max, bits)
