"""The part of the kernel protocol that NumPy and jax.numpy share; each overrides where it differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import numpy as np

from mesh_tf_core.ir.dtypes import FLOAT8
from mesh_tf_core.ir.kernel import BINARY, REDUCE, UNARY

A = Any
Functions = Mapping[str, Callable[..., A]]


def np_dtype(dtype: str) -> Any:
    """NumPy's dtype for a dtype name (bfloat16 and float8 from ml_dtypes)."""
    if dtype == "bfloat16" or dtype in FLOAT8:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)


def wide(x: A) -> A:
    """x in a dtype for sums: 16-bit numbers would lose small terms."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def library(module: Any, names: Mapping[str, str], own: Functions) -> Functions:
    """The functions of a table: a kernel's own, or those of its library by their names there."""
    return {fn: own[fn] if fn in own else attrgetter(name)(module) for fn, name in names.items()}


def libraries(xp: Any, of_one: Functions, of_two: Functions) -> tuple[Functions, Functions, Functions]:
    """The functions of one operand, of two, and along axes; the kernel's own functions are given."""
    names = [{fn: row.array for fn, row in table.items()} for table in (UNARY, BINARY, REDUCE)]
    one, two, joining = (library(xp, n, own) for n, own in zip(names, (of_one, of_two, {}), strict=True))
    return one, two, joining


class ArrayKernel:
    """The kernel protocol in a library with NumPy's names.

    Attributes:
      xp: the library.
      of_one, of_two, joining: its array functions by the names of `UNARY`, `BINARY` and `REDUCE`.
    """

    xp: Any
    of_one: Functions
    of_two: Functions
    joining: Functions

    def quiet(self) -> AbstractContextManager[Any]:
        """A context in which the library does not warn about infinite and undefined numbers."""
        return nullcontext()

    def unary(self, fn: str, x: A) -> A:
        with self.quiet():
            return self.of_one[fn](x)

    def binary(self, fn: str, x: A, y: A) -> A:
        with self.quiet():
            return self.of_two[fn](x, y)

    def where(self, condition: A, x: A, y: A) -> A:
        return self.xp.where(condition, x, y)

    def reduce(self, fn: str, x: A, axes: Sequence[int]) -> A:
        if not len(axes):
            return x
        if fn == "sum" and x.dtype.itemsize == 2:
            return self.xp.sum(x.astype(np.float32), axis=tuple(axes)).astype(x.dtype)
        # Libraries widen sums and products of small integers.
        same = {"dtype": x.dtype} if fn in ("sum", "prod") else {}
        return self.xp.asarray(self.joining[fn](x, axis=tuple(axes), **same))

    def softmax(self, x: A, axis: int) -> A:
        xp, x_ = self.xp, wide(x)
        with self.quiet():
            e = xp.exp(x_ - xp.max(x_, axis, keepdims=True))
            return (e / xp.sum(e, axis, keepdims=True)).astype(x.dtype)

    def logsumexp(self, x: A, axis: int) -> A:
        xp, x_ = self.xp, wide(x)
        top = xp.max(x_, axis, keepdims=True)
        with self.quiet():
            # Of infinities nothing can be subtracted; then the sum is one, or nothing.
            top = xp.where(xp.isfinite(top), top, np.zeros((), top.dtype))
            total = top + xp.log(xp.sum(xp.exp(x_ - top), axis, keepdims=True))
        return xp.squeeze(total, axis).astype(x.dtype)

    def exp_less(self, x: A, total: A, axis: int, own: bool) -> A:
        with self.quiet():
            return self.xp.exp(wide(x) - wide(total)).astype(x.dtype)

    def reshape(self, x: A, shape: Sequence[int]) -> A:
        return self.xp.reshape(x, tuple(shape))

    def transpose(self, x: A, permutation: Sequence[int]) -> A:
        return self.xp.transpose(x, tuple(permutation))

    def broadcast_to(self, x: A, shape: Sequence[int]) -> A:
        return self.xp.broadcast_to(x, tuple(shape))

    def concat(self, xs: Sequence[A], axis: int) -> A:
        return self.xp.concatenate(list(xs), axis) if len(xs) > 1 else xs[0]

    def flip(self, x: A, axis: int) -> A:
        return self.xp.flip(x, axis)

    def full(self, shape: Sequence[int], value: float, dtype: str) -> A:
        return self.xp.full(tuple(shape), self.scalar(value, dtype))

    def array(self, values: Any, dtype: str) -> A:
        return self.xp.asarray(np.asarray(values, np_dtype(dtype)))

    def scalar(self, value: Any, dtype: str) -> A:
        return np.asarray(value).astype(np_dtype(dtype))

    def together(self, fn: Callable[..., A], *xs: A) -> A:
        return fn(self, *xs)
