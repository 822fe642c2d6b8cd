"""Contractions in TensorFlow: einsums as matrix products, products by groups of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tf_core.kernels.contraction import ContractionOperand, matmul, same_order

T = Any


def summed(x: T, term: str, kept: str) -> tuple[T, str]:
    """x without the letters that nothing else needs."""
    axes = [i for i, c in enumerate(term) if c not in kept]
    return (tf.reduce_sum(x, axes), "".join(c for c in term if c in kept)) if axes else (x, term)


def ordered(x: T, term: str, out: str, sizes: dict[str, int]) -> T:
    """x with its axes in the order of `out`."""
    if term == out:
        return x
    if same_order(term, out, sizes):
        return tf.reshape(x, [sizes[c] for c in out])
    return tf.transpose(x, [term.index(c) for c in out])


def contract(x: T, y: T, tx: str, ty: str, out: str, sizes: dict[str, int]) -> T:
    """Two operands as a product and a sum (nothing to share) or as matrix products."""
    x, tx = summed(x, tx, ty + out)
    y, ty = summed(y, ty, tx + out)
    shared = [c for c in tx if c in ty and c not in out]
    alone = [c for c in tx + ty if (c in tx) != (c in ty)]
    if not shared or (not alone and len(out)):
        return _multiplied(x, y, tx, ty, out, sizes)
    plan = matmul(tx, ty, out, sizes)
    a, b, ta, tb = (y, x, ty, tx) if plan.swapped else (x, y, tx, ty)
    a = _matrix(
        ordered(a, ta, plan.first.letters, sizes), plan.first, plan.batch, plan.rows, plan.summed, sizes
    )
    b = _matrix(
        ordered(b, tb, plan.second.letters, sizes), plan.second, plan.batch, plan.summed, plan.columns, sizes
    )
    c = tf.matmul(a, b, transpose_a=plan.first.transposed, transpose_b=plan.second.transposed)
    c = tf.reshape(c, [sizes[letter] for letter in plan.result])
    return ordered(c, plan.result, out, sizes)


def _matrix(x: T, factor: ContractionOperand, batch: str, left: str, right: str, sizes: dict[str, int]) -> T:
    """One factor as [batch left right], or [batch right left] if it lies transposed."""
    many, m, n = (math.prod(sizes[c] for c in part) for part in (batch, left, right))
    return tf.reshape(x, [*([many] if batch else []), *((n, m) if factor.transposed else (m, n))])


def _multiplied(x: T, y: T, tx: str, ty: str, out: str, sizes: dict[str, int]) -> T:
    """Element by element over all letters, then the sum over those that `out` lacks."""
    largest = max((tx, ty), key=len)
    order = largest + "".join(c for c in tx + ty if c not in largest)
    if not set(order) - set(out):
        order = out
    aligned = []
    for z, term in ((x, tx), (y, ty)):
        here = "".join(c for c in order if c in term)
        z = ordered(z, term, here, sizes)
        aligned.append(tf.reshape(z, [sizes[c] if c in term else 1 for c in order]) if here != order else z)
    z, term = summed(tf.multiply(*aligned), order, out)
    return ordered(z, term, out, sizes)


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
