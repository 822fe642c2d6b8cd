"""Pooling: the maximum, sum or mean of windows, also where their dimensions are split (as in `conv`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.kinds import FirstDerivative, Reduction
from mesh_tf_core.ops.pieces import window
from mesh_tf_core.ops.windows import Pads, Window, fitted, spread, strided, windows

LOWEST = float("-inf")

Strides = int | Sequence[int] | None


@dataclass(frozen=True)
class WindowPart:
    """The work of a device along one window's dimension, relative to its shard.

    Attributes:
      inputs: where its inputs begin.
      outputs: where its outputs begin.
      size, total: inputs in its piece, and in all pieces.
    """

    inputs: int
    outputs: int
    size: int
    total: int


Parts = tuple[WindowPart, ...] | None
WindowSpan = tuple[int, int]


def _taps(geometry: Sequence[Window]) -> list[tuple[int, ...]]:
    return list(product(*(range(v.size) for v in geometry)))


def _prepared(k: Kernel, at: At, x: Any, shape: Shape, op: OverWindows, outputs: Sequence[int]) -> Any:
    """The inputs of `outputs` windows per dimension; for the maximum, padding is the lowest number."""
    fill = LOWEST if op.fn == "max" else 0.0
    for i, v in enumerate(op.windows):
        axis = shape.index(v.dim)
        part = op.parts[i] if op.parts else WindowPart(0, 0, shape.sizes[axis], shape.sizes[axis])
        if op.fn == "max" and v.dim in at.split:
            place = k.scalar(at.shard(v.dim) * part.size + part.inputs, "int32")
            positions = k.binary("add", k.iota(shape.sizes[axis], "int32"), place)
            inside = k.binary(
                "and",
                k.binary("ge", positions, k.scalar(0, "int32")),
                k.binary("lt", positions, k.scalar(part.total, "int32")),
            )
            inside = k.reshape(inside, [shape.sizes[axis] if j == axis else 1 for j in range(len(shape))])
            x = k.where(inside, x, k.scalar(fill, at.inputs[0].dtype))
        first = part.outputs * v.stride - v.before
        x = fitted(k, x, axis, part.inputs - first, (outputs[i] - 1) * v.stride + v.reach, fill)
    return x


def _tap(k: Kernel, x: Any, shape: Shape, op: OverWindows, tap: Sequence[int], counts: Sequence[int]) -> Any:
    for v, t, count in zip(op.windows, tap, counts, strict=True):
        x = strided(k, x, shape.index(v.dim), t * v.dilation, count, v.stride)
    return x


@dataclass(frozen=True)
class OverWindows(Reduction, abstract=True):
    """An operation on every window of its first operand.

    Attributes:
      parts: for each window, the part of this device (set by lowering).
    """

    fn: str
    windows: tuple[Window, ...]
    parts: Parts = None

    def spans(self, window: Window, inside: int, outside: int) -> list[WindowSpan]:
        """The elements of each operand that a device with so many inputs and outputs needs."""
        raise NotImplementedError

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        found, parts = [*inputs], []
        for v in self.windows:
            here = low.values[found[0]]
            count, inside = low.oracle.ways(here.split_of(v.dim)), here.shape.dim(v.dim).size
            outside = v.outputs(inside)
            if count > 1 and v.split_alike(inside, outside, count):
                spans = self.spans(v, inside // count, outside // count)
                for i in reversed(range(len(spans))):
                    found[i] = window(low, found[i], v.dim, *spans[i])
                parts.append(
                    WindowPart(spans[0][0], spans[1][0] if spans[1:] else 0, inside // count, inside)
                )
            else:
                found = [low.without(x, [v.dim]) for x in found]
                parts.append(WindowPart(0, 0, inside, inside))
        splits = tuple(low.values[found[0]].split_of(n) for n in types[0].shape.names)
        return low.local(replace(self, parts=tuple(parts)), found, types, [splits])


@dataclass(frozen=True)
class Pool(OverWindows):
    """The maximum or sum of every window; padding counts as nothing."""

    def __post_init__(self) -> None:
        if self.fn not in ("max", "sum"):
            raise UserError(f"pool: fn must be 'max' or 'sum', found {self.fn!r}")

    @property
    def name(self) -> str:
        return f"{self.fn}_pool"

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        if not is_float(x.dtype):
            raise UserError(
                f"{self.name} of {x}: the tensor must have a float dtype; cast it first, e.g. with "
                ".cast('float32')"
            )
        sizes = {v.dim: v.outputs(x.shape.dim(v.dim).size) for v in self.windows}
        return TensorType(Shape(Dim(d.name, sizes.get(d.name, d.size)) for d in x.shape), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        counts = [at.outputs[0].shape.dim(v.dim).size for v in self.windows]
        x = _prepared(k, at, slices[0], at.inputs[0].shape, self, counts)
        out = None
        for tap in _taps(self.windows):
            part = _tap(k, x, at.inputs[0].shape, self, tap, counts)
            out = part if out is None else k.binary("max" if self.fn == "max" else "add", out, part)
        return out

    def flops(self, *local: TensorType) -> float:
        steps = math.prod(v.stride for v in self.windows)
        return local[0].shape.size / steps * math.prod(v.size for v in self.windows)

    def spans(self, window: Window, inside: int, outside: int) -> list[WindowSpan]:
        return [window.inputs_of(0, outside)]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(PoolGrad(self.fn, self.windows), inputs[0], dy),)


@dataclass(frozen=True)
class PoolGrad(FirstDerivative, OverWindows):
    """From (x, dy): dy to the first largest input of each window, or (sum) to all of them."""

    @property
    def name(self) -> str:
        return f"{self.fn}_pool_grad"

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        shape, dtype = at.inputs[0].shape, at.inputs[0].dtype
        counts = [at.inputs[1].shape.dim(v.dim).size for v in self.windows]
        x = _prepared(k, at, slices[0], shape, self, counts)
        dy, lengths = slices[1], list(x.shape)
        taps = _taps(self.windows)
        best, left, total = None, None, k.full(lengths, 0.0, dtype)
        if self.fn == "max":
            for tap in taps:
                part = _tap(k, x, shape, self, tap, counts)
                best = part if best is None else k.binary("max", best, part)
        for tap in taps:
            share = dy
            if self.fn == "max":
                part = _tap(k, x, shape, self, tap, counts)
                # NaN, which equals nothing, is the largest of its window.
                hit = k.binary("or", k.binary("eq", part, best), k.binary("ne", part, part))
                hit = hit if left is None else k.binary("and", hit, left)
                missed = k.unary("not", hit)
                left = missed if left is None else k.binary("and", left, missed)
                share = k.where(hit, dy, k.scalar(0.0, dtype))
            for v, t in zip(self.windows, tap, strict=True):
                axis = shape.index(v.dim)
                share = fitted(k, spread(k, share, axis, v.stride), axis, t * v.dilation, lengths[axis])
            total = k.binary("add", total, share)
        for i, v in enumerate(self.windows):
            first = (self.parts[i].outputs if self.parts else 0) * v.stride - v.before
            axis = shape.index(v.dim)
            total = fitted(k, total, axis, first, at.outputs[0].shape.sizes[axis])
        return total

    def flops(self, *local: TensorType) -> float:
        return 3.0 * local[1].shape.size * math.prod(v.size for v in self.windows)

    def spans(self, window: Window, inside: int, outside: int) -> list[WindowSpan]:
        outputs = window.outputs_of(0, inside)
        return [window.inputs_of(*outputs), outputs]


def _pool(fn: str, x: Tensor, dims: Sequence[Dim], sizes: Sequence[int], strides: Any, pads: Pads) -> Tensor:
    steps = sizes if strides is None else strides
    found = windows([x.shape.dim(d.name) for d in dims], sizes, steps, 1, pads)
    return x.graph.apply(Pool(fn, found), x)


def max_pool(
    x: Tensor, dims: Sequence[Dim], sizes: Sequence[int], strides: Strides = None, pads: Pads = "valid"
) -> Tensor:
    """The largest element of every window along `dims`, which keep their names.

    Args:
      sizes: sizes of the windows; strides: by default the sizes, so that windows do not overlap.
      pads: `valid`, `same`, or (before, after) per dimension.
    """
    return _pool("max", x, dims, sizes, strides, pads)


def sum_pool(
    x: Tensor, dims: Sequence[Dim], sizes: Sequence[int], strides: Strides = None, pads: Pads = "valid"
) -> Tensor:
    """The sum of every window; arguments as of `max_pool`."""
    return _pool("sum", x, dims, sizes, strides, pads)


def avg_pool(
    x: Tensor, dims: Sequence[Dim], sizes: Sequence[int], strides: Strides = None, pads: Pads = "valid"
) -> Tensor:
    """The mean of every window over its elements that are not padding; arguments as of `max_pool`."""
    ones = broadcast(constant_like(x, 1.0), [x.shape.dim(d.name) for d in dims])
    return sum_pool(x, dims, sizes, strides, pads) / sum_pool(ones, dims, sizes, strides, pads)
