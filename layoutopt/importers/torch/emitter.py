"""Equations of the contract, one method for each kind that ATen's operations become."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import (
    FIRST,
    KEY,
    CapturedArray,
    Constants,
    Equation,
    IndexNumbers,
    Operand,
    Var,
)

Scalar = Operand | int | float | bool
"""An operand, or a number."""
Extents = Sequence[int]


class Equations:
    """Appends equations.

    Attributes:
      equations: so far.
      where, scope, recomputed, call: file and line, module, checkpoint and call of what is written now.
      made: id of a value -> the equation that computes it.
      key: the random key of the step; None if nothing is drawn.
      notes: on how the equations differ from the operations, each with the value that it is about, if any.
      whole: values that a step in parts has of the whole batch: counts of targets, statistics of BatchNorm.
      targets: numbers (`id`) of the arrays of targets whose rows are counted.
      norms: paths of modules whose own code takes these statistics.
    """

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.where = self.scope = self.recomputed = self.call = ""
        self.made: dict[int, Equation] = {}
        self.key: Var | None = None
        self.whole: list[Operand] = []
        self.norms, self.targets = set[str](), set[int]()
        self.notes: dict[str, Operand | None] = {}
        self._constants = Constants()
        self._draws = 0

    def several(self, prim: str, ins: Sequence[Operand], outs: Sequence[Var], **params: Any) -> list[Var]:
        """The results of an equation."""
        e = Equation(prim, list(ins), list(outs), params, self.where, self.scope)
        e.recomputed, e.call = self.recomputed, self.call
        self.equations.append(e)
        self.made.update((id(y), e) for y in e.outs)
        return e.outs

    def emit(self, prim: str, ins: Sequence[Operand], shape: Extents, dtype: str, **params: Any) -> Var:
        """The result of an equation."""
        return self.several(prim, ins, [Var(tuple(map(int, shape)), dtype)], **params)[0]

    def maker(self, x: Operand, *prims: str) -> Equation | None:
        """The equation that computes a value, if it is one of these."""
        found = self.made.get(id(x))
        return found if found is not None and found.prim in prims else None

    def constant(self, value: Any, dtype: str) -> CapturedArray:
        """An array that is known."""
        array = np.asarray(value)
        if dtype.startswith("int") and array.dtype.kind == "i":
            array = np.clip(array, np.iinfo(dtype).min, np.iinfo(dtype).max)
        return self._constants.of(np.asarray(array, "float32" if dtype == "bfloat16" else dtype), dtype)

    def operand(self, x: Scalar, dtype: str) -> Operand:
        """A value or a number in an element type."""
        if isinstance(x, Var | CapturedArray):
            return self.cast(x, dtype)
        if x is None:
            raise NotImplementedError("it reads a number that depends on values")
        return self.constant(x, dtype)

    def cast(self, x: Operand, dtype: str) -> Operand:
        if x.dtype == dtype:
            return x
        if isinstance(x, CapturedArray) and x.shape == ():
            return self.constant(x.value, dtype)
        return self.emit("convert_element_type", [x], x.shape, dtype, new_dtype=dtype)

    def unary(self, prim: str, x: Operand, **params: Any) -> Var:
        return self.emit(prim, [x], x.shape, x.dtype, **params)

    def full(self, value: Scalar, shape: Extents, dtype: str) -> Operand:
        """An array of one number."""
        return self.broadcast(self.operand(value, dtype), shape, ())

    def reshape(self, x: Operand, shape: Extents) -> Operand:
        shape = tuple(map(int, shape))
        if x.shape == shape:
            return x
        return self.emit("reshape", [x], shape, x.dtype, new_sizes=shape, dimensions=None)

    def broadcast(self, x: Operand, shape: Extents, axes: Iterable[int]) -> Operand:
        """x with new axes: axis i of x is axis axes[i] of the result."""
        shape, axes = tuple(map(int, shape)), tuple(axes)
        if x.shape == shape:
            return x
        return self.emit("broadcast_in_dim", [x], shape, x.dtype, broadcast_dimensions=axes)

    def expand(self, x: Operand, shape: Extents) -> Operand:
        """x repeated along axes of one element, and along new axes in front."""
        return self.broadcast(x, shape, range(len(shape) - len(x.shape), len(shape)))

    def ranked(self, x: Operand, rank: int) -> Operand:
        """x with axes of one element in front; numbers stay numbers."""
        if x.shape == () or len(x.shape) >= rank:
            return x
        return self.reshape(x, (*(1,) * (rank - len(x.shape)), *x.shape))

    def transpose(self, x: Operand, order: Extents) -> Operand:
        order = tuple(a % len(order) for a in order)
        if order == tuple(range(len(order))):
            return x
        return self.emit("transpose", [x], [x.shape[a] for a in order], x.dtype, permutation=order)

    def slice(self, x: Operand, axis: int, begin: int, size: int, step: int = 1) -> Operand:
        """`size` elements of an axis."""
        if size == x.shape[axis] and step == 1:
            return x
        begins, ends, shape = [0] * len(x.shape), list(x.shape), list(x.shape)
        begins[axis], ends[axis], shape[axis] = begin, begin + (size - 1) * step + 1, size
        strides = None if step == 1 else tuple(step if a == axis else 1 for a in range(len(shape)))
        limits = {"start_indices": tuple(begins), "limit_indices": tuple(ends), "strides": strides}
        return self.emit("slice", [x], shape, x.dtype, **limits)

    def concatenate(self, xs: Sequence[Operand], axis: int) -> Operand:
        xs = [x for x in xs if 0 not in x.shape] or xs[:1]
        if len(xs) == 1:
            return xs[0]
        shape = list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        return self.emit("concatenate", xs, shape, xs[0].dtype, dimension=axis)

    def binary(self, prim: str, a: Scalar, b: Scalar, dtype: str, out: str = "") -> Operand:
        """An element-wise operation of two, which broadcast; computed in `dtype`."""
        x, y = self.operand(a, dtype), self.operand(b, dtype)
        shape = np.broadcast_shapes(x.shape, y.shape)
        none = prim in ("add", "sub") and isinstance(y, CapturedArray) and not np.any(y.value)
        if none and x.dtype == dtype and "int" in dtype and x.shape == shape:
            return x
        x, y = self.ranked(x, len(shape)), self.ranked(y, len(shape))
        return self.emit(prim, [x, y], shape, out or dtype)

    def select(self, where: Operand, yes: Scalar, no: Scalar, dtype: str) -> Operand:
        """yes where `where`, else no."""
        x, y = self.operand(yes, dtype), self.operand(no, dtype)
        shape = np.broadcast_shapes(where.shape, x.shape, y.shape)
        ins = [self.expand(v, shape) if v.shape else self.broadcast(v, shape, ()) for v in (where, y, x)]
        return self.emit("select_n", ins, shape, dtype)

    def reduced(
        self, prim: str, x: Operand, axes: Iterable[int], keep: bool = False, **params: Any
    ) -> Operand:
        rank = len(x.shape)
        gone = tuple(sorted({a % rank for a in axes}))
        kept = [a for a in range(rank) if a not in gone]
        y = self.emit(prim, [x], [x.shape[a] for a in kept], x.dtype, axes=gone, **params)
        return self.broadcast(y, [1 if a in gone else x.shape[a] for a in range(rank)], kept) if keep else y

    def mean(self, x: Operand, axes: Iterable[int], keep: bool = False) -> Operand:
        axes = list(axes)
        count = math.prod(x.shape[a] for a in axes)
        return self.binary("mul", self.reduced("reduce_sum", x, axes, keep), 1 / count, x.dtype)

    def clamped(
        self, x: Operand, low: Scalar | None, high: Scalar | None, dtype: str, slope: str = FIRST
    ) -> Operand:
        """x between two ends, where its slope is 1 (FIRST) or 0 (FLAT)."""
        for prim, end in (("max", low), ("min", high)):
            if end is not None:
                x = self.binary(prim, x, end, dtype)
                self.equations[-1].params[slope] = True
        return x

    def softmax(self, x: Operand, axis: int, log: bool = False) -> Operand:
        most = self.unary("stop_gradient", self.reduced("reduce_max", x, [axis], True))
        z = self.binary("sub", x, most, x.dtype)
        e = self.unary("exp", z)
        total = self.reduced("reduce_sum", e, [axis], True)
        if log:
            return self.binary("sub", z, self.unary("log", total), x.dtype)
        return self.binary("div", e, total, x.dtype)

    def product(
        self,
        x: Operand,
        y: Operand,
        summed: tuple[Iterable[int], Iterable[int]],
        batch: tuple[Iterable[int], Iterable[int]] = ((), ()),
    ) -> Var:
        """A product of two: pairs of axes that are summed out, and that both have."""
        (lc, rc), (lb, rb) = (tuple(map(tuple, pair)) for pair in (summed, batch))
        shape = [x.shape[a] for a in lb]
        shape += [n for a, n in enumerate(x.shape) if a not in (*lc, *lb)]
        shape += [n for a, n in enumerate(y.shape) if a not in (*rc, *rb)]
        numbers = ((lc, rc), (lb, rb))
        return self.emit("dot_general", [x, y], shape, x.dtype, dimension_numbers=numbers)

    def added(self, y: Operand, bias: Operand | None, axis: int = -1) -> Operand:
        """A result with what is added to every element along an axis."""
        return y if bias is None else self.along("add", y, bias, [axis])

    def along(self, prim: str, y: Operand, x: Operand, axes: Extents) -> Operand:
        """An operation of y and an array of some of its axes."""
        rank = len(y.shape)
        axes = [a % rank for a in axes]
        lead = [y.shape[a] if a in axes else 1 for a in range(rank)]
        return self.binary(prim, y, self.broadcast(self.cast(x, y.dtype), lead, axes), y.dtype)

    def drawn(self, prim: str, shape: Extents, dtype: str = "float32") -> Var:
        """Random numbers of a key of their own."""
        return self.emit(prim, [self.folded_key()], shape, dtype)

    def folded_key(self) -> Var:
        """A random key of its own."""
        if self.key is None:
            self.key = Var((), KEY, path="rng")
        self._draws += 1
        return self.emit("random_fold_in", [self.key, self.constant(self._draws - 1, "uint32")], (), KEY)

    def dropout(self, x: Operand, rate: float, shape: Extents | None = None) -> Operand:
        """x with elements set to 0 at random; `shape`: of the mask."""
        if rate == 0:
            return x
        drawn = self.drawn("random_uniform", shape or x.shape)
        kept = self.emit("lt", [drawn, self.constant(1 - rate, "float32")], drawn.shape, "bool")
        return self.select(kept, self.binary("mul", x, 1 / (1 - rate), x.dtype), 0, x.dtype)

    def rows(self, table: Operand, ids: Operand) -> Operand:
        """table[ids]."""
        k, rest = len(ids.shape), table.shape[1:]
        at = IndexNumbers(tuple(range(k, k + len(rest))), (0,), (0,))
        return self.gather(table, ids, (*ids.shape, *rest), at, (1, *rest))

    def picked(self, x: Operand, ids: Operand) -> Operand:
        """x[..., ids[...]], one element of the last axis for each index."""
        n = len(x.shape) - 1
        lead = tuple(range(n))
        at = IndexNumbers((), (n,), (n,), lead, lead)
        return self.gather(x, ids, ids.shape, at, (1,) * (n + 1))

    def gather(self, x: Operand, ids: Operand, shape: Extents, at: IndexNumbers, sizes: Extents) -> Operand:
        """Places of x; the last axis of `ids` is made here if every index is one number."""
        if len(at.start_index_map) == 1:
            ids = self.reshape(ids, (*ids.shape, 1))
        more = {"dimension_numbers": at, "slice_sizes": tuple(sizes), "mode": "clip", "fill_value": None}
        return self.emit("gather", [x, ids], shape, x.dtype, **more)

    def counted(self, shape: Extents, axis: int, dtype: str) -> Operand:
        """0, 1, ... along an axis."""
        return self.emit("iota", [], shape, dtype, dimension=axis)
