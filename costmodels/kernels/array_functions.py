"""The array functions that one device calls in a local instruction, one by one, with their bytes.

An operation's own kernel runs on pieces that have a shape and no elements (`Tally` is one more implementation
of the kernel protocol), so the counted calls are those of an engine: a layer normalisation is eight passes
over memory, a softmax one. Nothing here depends on an operation. `calls` has the costs of calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from costmodels.kernels.calls import FAR, SCALAR, Call, NoArrayFunctionError, Piece
from mesh_tf_core.ir.dtypes import FLOAT8, itemsize
from mesh_tf_core.ir.kernel import BINARY, UNARY, At, LoopStep, WithoutLibraryKernels
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.kernels.contraction import MatMul, PairwiseEinsum

VECTOR = 16
"""Numbers of float32 that processors of today work on at once."""
NARROW = 64
"""Bytes in a row below which a copy moves single numbers instead of whole lines of a cache."""


def calls(
    op: Op, inputs: Sequence[TensorType], outputs: Sequence[TensorType], split: frozenset[str]
) -> list[Call]:
    """The array functions of `op` on pieces of these types; `split`: names of the dimensions that are split.

    Raises:
      NoArrayFunctionError: the operation uses an array function that `Tally` does not have.
    """
    tally = Tally()
    given, made = (tuple(t.places for t in types) for types in (inputs, outputs))
    at = At(given, made, split, lambda name: 0)
    try:
        op.kernel(tally, at, *(Piece(t.shape.sizes, t.dtype) for t in given))
    except NoArrayFunctionError as error:
        raise NoArrayFunctionError(
            f"{op.name}: the cost model has no time for the array function {str(error)!r}"
        ) from None
    return tally.calls


_FOLDED = 100 * 1024


class Tally(WithoutLibraryKernels, PairwiseEinsum):
    """The kernel protocol on `Piece`s; notes every call."""

    compares = False

    def __init__(self) -> None:
        self.noted: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        raise NoArrayFunctionError(name)

    @property
    def calls(self) -> list[Call]:
        """The calls so far; the last one makes the output."""
        return [*(replace(c, final=False) for c in self.noted[:-1]), *self.noted[-1:]]

    def _note(
        self,
        op_class: str,
        shape: Sequence[int],
        dtype: str,
        *read: Piece,
        flops: float = 0.0,
        packed: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    ) -> Piece:
        """Of a product, `packed` are bytes by `PARTS`, but for its result."""
        out = Piece(tuple(shape), dtype, all(x.constant for x in read))
        if out.constant and out.bytes <= _FOLDED:
            return out
        moved = float(out.bytes + sum(x.bytes for x in read))
        first, second, near, far = packed
        parts = (first, second, float(out.bytes), near, far) if flops else ()
        name = f"kernel.{op_class}" if any(x.shape for x in (out, *read)) else SCALAR
        self.noted.append(Call(name, dtype, moved, flops, float(out.bytes), parts))
        return replace(out, constant=False)

    # -- element by element ----------------------------------------------------------------------------------

    def unary(self, fn: str, x: Piece) -> Piece:
        kind = fn.replace("_", ".")  # gelu_exact takes as long as gelu
        return self._note(f"unary.{kind}", x.shape, "bool" if UNARY[fn].gives_bool else x.dtype, x)

    def binary(self, fn: str, x: Piece, y: Piece) -> Piece:
        shape = _broadcast(x.shape, y.shape)
        dtype = "bool" if BINARY[fn].gives_bool else x.dtype
        return self._note(f"binary.{_pattern(shape, x, y)}.{fn}", shape, dtype, x, y)

    def where(self, condition: Piece, x: Piece, y: Piece) -> Piece:
        shape = _broadcast(_broadcast(condition.shape, x.shape), y.shape)
        pattern = _pattern(shape, condition, x, y)
        # TensorFlow's fast path needs three equal shapes; a scalar goes the slow way of all broadcasts.
        if pattern == "same" and any(p.shape != shape for p in (condition, x, y)):
            pattern = "scalar"
        return self._note(f"where.{pattern}", shape, x.dtype, condition, x, y)

    def cast(self, x: Piece, dtype: str) -> Piece:
        kind = "bool" if "bool" in (x.dtype, dtype) else "number"
        return x if x.dtype == dtype else self._note(f"cast.{kind}", x.shape, dtype, x)

    # -- along axes ------------------------------------------------------------------------------------------

    def reduce(self, fn: str, x: Piece, axes: Sequence[int]) -> Piece:
        if not len(axes):
            return x
        shape = [n for i, n in enumerate(x.shape) if i not in axes]
        return self._note(f"reduce.{_place(x.shape, axes)}", shape, x.dtype, x)

    def softmax(self, x: Piece, axis: int) -> Piece:
        if axis % len(x.shape) == len(x.shape) - 1:
            return self._note("softmax", x.shape, x.dtype, x)
        top = self._kept(self.reduce("max", x, [axis]), x, axis)
        e = self.unary("exp", self.binary("sub", x, top))
        return self.binary("div", e, self._kept(self.reduce("sum", e, [axis]), x, axis))

    def logsumexp(self, x: Piece, axis: int) -> Piece:
        if axis % len(x.shape) == len(x.shape) - 1 and itemsize(x.dtype) > 2:
            top, first = self.reduce("max", x, [axis]), self.softmax(x, axis)
            return self.binary("sub", top, self.unary("log", self.reduce("max", first, [axis])))
        top = self._kept(self.reduce("max", x, [axis]), x, axis)
        total = self.unary("log", self.reduce("sum", self.unary("exp", self.binary("sub", x, top)), [axis]))
        return self.binary("add", total, self.reshape(top, total.shape))

    def exp_less(self, x: Piece, total: Piece, axis: int, own: bool) -> Piece:
        return self.softmax(x, axis) if own else self.unary("exp", self.binary("sub", x, total))

    def _kept(self, reduced: Piece, x: Piece, axis: int) -> Piece:
        return self.reshape(reduced, [1 if i == axis else n for i, n in enumerate(x.shape)])

    def cumsum(self, x: Piece, axis: int, exclusive: bool, reverse: bool) -> Piece:
        return self._note("cumulative", x.shape, x.dtype, x)

    def argmax(self, x: Piece, axis: int) -> Piece:
        shape = [n for i, n in enumerate(x.shape) if i != axis]
        return self._note("reduce.argmax", shape, "int32", x)

    def top_k(self, x: Piece, n: int) -> tuple[Piece, Piece]:
        found = self._note("sort", (*x.shape[:-1], n), x.dtype, x)
        return found, replace(found, dtype="int32")

    # -- moves -----------------------------------------------------------------------------------------------

    def reshape(self, x: Piece, shape: Sequence[int]) -> Piece:
        return replace(x, shape=tuple(shape))

    def transpose(self, x: Piece, permutation: Sequence[int]) -> Piece:
        shape = [x.shape[p] for p in permutation]
        moved = [p for p in permutation if x.shape[p] != 1]
        if moved == sorted(moved):
            return self.reshape(x, shape)
        rows = moved[-1] == max(moved) and x.shape[moved[-1]] * itemsize(x.dtype) >= 32
        return self._note("transpose.rows" if rows else "transpose.elements", shape, x.dtype, x)

    def broadcast_to(self, x: Piece, shape: Sequence[int]) -> Piece:
        return x if x.shape == tuple(shape) else self._note("broadcast", shape, x.dtype, x)

    def concat(self, xs: Sequence[Piece], axis: int) -> Piece:
        if len(xs) == 1:
            return xs[0]
        total = sum(x.shape[axis] for x in xs)
        shape = [total if i == axis else n for i, n in enumerate(xs[0].shape)]
        return self._note("copy.concat", shape, xs[0].dtype, *xs)

    def slice(self, x: Piece, begin: Sequence[Any], sizes: Sequence[int]) -> Piece:
        part = replace(x, shape=tuple(sizes))
        if x.shape[1:] == part.shape[1:]:
            return part  # of whole rows from some row on: nothing is copied
        kind = "copy.narrow" if narrow(x.shape, part.shape, x.dtype) else "copy.slice"
        return self._note(kind, sizes, x.dtype, part)

    def put(self, x: Piece, piece: Piece, axis: int, place: Any) -> Piece:
        """Written in place: only the piece is moved."""
        self._note("copy.put", piece.shape, x.dtype, piece)
        return replace(x, constant=False)

    def add_at(self, x: Piece, values: Piece, ids: Piece, axis: int) -> Piece:
        """Written in place: only the added part is moved."""
        self._note("copy.put", values.shape, x.dtype, values, ids)
        return replace(x, constant=False)

    def pad(self, x: Piece, paddings: Sequence[tuple[int, int]], value: float = 0.0) -> Piece:
        shape = [n + a + b for n, (a, b) in zip(x.shape, paddings, strict=True)]
        return self._note("copy.pad", shape, x.dtype, x)

    def flip(self, x: Piece, axis: int) -> Piece:
        return self._note("copy.flip", x.shape, x.dtype, x)

    def take(self, table: Piece, ids: Piece) -> Piece:
        shape = (*ids.shape, *table.shape[1:])
        found = replace(table, shape=shape)
        rows = math.prod(table.shape[1:]) * itemsize(table.dtype) >= 32
        return self._note("take.rows" if rows else "take.elements", shape, table.dtype, found, ids)

    def segment_sum(self, x: Piece, ids: Piece, n: int, most: bool = False) -> Piece:
        return self._note("segment_sum", (n, *x.shape[len(ids.shape) :]), x.dtype, x, ids)

    def together(self, fn: Callable[..., Piece], *xs: Piece) -> Piece:
        """One pass over the result."""
        first = len(self.noted)
        made = fn(self, *xs)
        del self.noted[first:]
        return self._note("unary.together", made.shape, made.dtype, *xs)

    # -- blocks ----------------------------------------------------------------------------------------------

    def loop(self, n: int, step: LoopStep, carried: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        """Counts its calls once per iteration; each result is copied into its stack."""
        first = len(self.noted)
        state, made = step(0, carried)
        self.noted += self.noted[first:] * (n - 1)
        return state, [self._note("copy.concat", (n, *x.shape), x.dtype, x) for x in made]

    # -- made from nothing -----------------------------------------------------------------------------------

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Piece:
        return self._note("full", shape, dtype) if len(shape) else self.scalar(value, dtype)

    def iota(self, n: int, dtype: str) -> Piece:
        return Piece((n,), dtype, constant=True)

    def array(self, values: Any, dtype: str) -> Piece:
        return Piece(np.shape(values), dtype, constant=True)

    def scalar(self, value: Any, dtype: str) -> Piece:
        return Piece((), dtype, constant=not isinstance(value, Piece) or value.constant)

    # -- contractions ----------------------------------------------------------------------------------------

    def einsum(self, spec: str, *xs: Piece) -> Piece:
        if xs[0].dtype in FLOAT8:
            xs = tuple(self.cast(x, "float32") for x in xs)
        found: Piece = self.contracted(spec, *xs)
        return found

    def product(self, a: Piece, b: Piece, plan: MatMul, sizes: Mapping[str, int]) -> Piece:
        shape = tuple(sizes[c] for c in plan.result)
        parts = (plan.batch, plan.rows, plan.columns, plan.summed)
        batch, rows, _, inner = (math.prod(sizes[c] for c in part) for part in parts)
        width = itemsize(a.dtype)
        near = far = 0.0
        # What is read along columns, and the elements from one of its rows to the next.
        for piece, row in (
            (a, rows if plan.first.transposed else 0),
            (b, inner if plan.second.transposed else 0),
        ):
            if row * width >= FAR:
                far += piece.bytes
            elif row:
                near += piece.bytes
        return self._note(
            "batch" if batch > 1 else "matmul",
            shape,
            a.dtype,
            a,
            b,
            flops=2.0 * math.prod(shape) * inner,
            packed=(float(a.bytes), float(b.bytes), near, far),
        )

    def conv(self, x: Piece, w: Piece, strides: Sequence[int], dilations: Sequence[int]) -> Piece:
        reach = [(k - 1) * d + 1 for k, d in zip(w.shape, dilations, strict=False)]
        counts = [(n - r) // s + 1 for n, r, s in zip(x.shape[1:], reach, strides, strict=False)]
        shape, taken = (x.shape[0], *counts, w.shape[-1]), math.prod(w.shape[:-1])
        windows = float(math.prod(shape[:-1]) * taken * itemsize(x.dtype))
        made = -(-shape[-1] // VECTOR) * VECTOR
        flops, weights = 2.0 * math.prod(shape[:-1]) * made * taken, float(taken * made * itemsize(w.dtype))
        return self._note(
            "matmul.conv", shape, x.dtype, x, w, flops=flops, packed=(windows, weights, 0.0, 0.0)
        )

    def grouped(self, x: Piece, w: Piece, ids: Piece, groups: int) -> Piece:
        """As if all groups had as many rows."""
        n, inner, made = w.shape
        rows, used = x.shape[0], x.bytes * n / groups
        flops, packed = 2.0 * rows * n / groups * inner * made, (used, float(w.bytes), 0.0, 0.0)
        return self._note("batch", (rows, made), x.dtype, x, w, flops=flops, packed=packed)

    def grouped_outer(self, x: Piece, y: Piece, ids: Piece, n: int, groups: int) -> Piece:
        shape, part = (n, x.shape[1], y.shape[1]), n / groups
        flops, packed = (
            2.0 * math.prod(shape) * x.shape[0] / groups,
            (x.bytes * part, y.bytes * part, 0.0, 0.0),
        )
        return self._note("batch", shape, x.dtype, x, y, flops=flops, packed=packed)


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of two arrays together, by NumPy's rules."""
    n = max(len(a), len(b))
    a, b = (1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))


def narrow(whole: Sequence[int], part: Sequence[int], dtype: str) -> bool:
    """True if a part of an array consists of rows of less than `NARROW` bytes."""
    row = itemsize(dtype)
    for n, all_of_it in zip(reversed(part), reversed(whole), strict=True):
        row *= n
        if n != all_of_it:
            break
    return row < NARROW


def _pattern(shape: tuple[int, ...], *operands: Piece) -> str:
    """How operands are repeated: 'same' (or scalars), 'row', 'column', or 'general'."""
    found = {_repeated(shape, x.shape) for x in operands} - {"same"}
    if len(found) == 1:
        return found.pop()
    return "general" if found else "same"


def _repeated(shape: tuple[int, ...], own: tuple[int, ...]) -> str:
    own = (1,) * (len(shape) - len(own)) + own
    runs: list[bool] = []
    for n, m in zip(shape, own, strict=True):
        if n > 1 and (not runs or runs[-1] != (m == n)):
            runs.append(m == n)
    if runs in ([], [True], [False]):
        return "same"
    return "row" if runs == [False, True] else "column" if runs == [True, False] else "general"


def _place(shape: tuple[int, ...], axes: Sequence[int]) -> str:
    """Where the reduced axes lie: 'inner', 'outer', 'middle' (between what is kept), 'mixed' (around it), or
    'apart' (several times in turn)."""
    runs: list[bool] = []
    for i, n in enumerate(shape):
        if n > 1 and (not runs or runs[-1] != (i in axes)):
            runs.append(i in axes)
    if len(runs) <= 2:
        return "outer" if runs[:1] == [True] and len(runs) == 2 else "inner"
    return "apart" if len(runs) > 3 else "mixed" if runs[0] else "middle"
