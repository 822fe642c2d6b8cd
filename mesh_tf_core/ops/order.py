"""Order along one dimension: the largest elements and where they are, sorting.

NaN counts as the largest number, and equal elements are ordered by position: `sort` puts NaN last, as NumPy
does, `sort(descending=True)` and `top_k` first, `nth_smallest` after all numbers. As in NumPy, `argmax` and
`argmin` return the position of the first NaN if there is one; `reduce_max` and `reduce_min` then return NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float, whole_numbers
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.layout import check_disjoint
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.along import PutAlong, row_starts
from mesh_tf_core.ops.binary import binary, where
from mesh_tf_core.ops.index import Range
from mesh_tf_core.ops.kinds import AlongWhole, MadeByLowering, NoGradient, Reduction, dim_name
from mesh_tf_core.ops.math import logical_not, not_equal
from mesh_tf_core.ops.reduce import Reduce, reduce_max, reduce_min, reduce_sum
from mesh_tf_core.ops.shape import rename, reshape, slice_dim


def _last(k: Kernel, x: Any, shape: Shape, dim: str) -> Any:
    axis = shape.index(dim)
    order = [*(i for i in range(len(shape)) if i != axis), axis]
    return k.transpose(x, order) if axis != len(shape) - 1 else x


@dataclass(frozen=True)
class ArgMax(NoGradient, AlongWhole, Reduction):
    """int32 position of the first largest element along one dimension, which disappears."""

    why: ClassVar[str] = "the largest element may be anywhere in the dimension"

    def infer(self, *inputs: TensorType) -> TensorType:
        inputs[0].shape.index(self.dim)
        return TensorType(inputs[0].shape.without(self.dim), "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.argmax(slices[0], at.inputs[0].shape.index(self.dim))

    def expand(self, *inputs: Tensor) -> Tensor:
        """The smallest position whose element is the maximum: two small messages instead of all elements."""
        (x,) = inputs
        dim = x.shape.dim(self.dim)
        places = x.graph.apply(Range(dim, "int32"))
        best = where(x.equal(reduce_max(x, self.dim)), places, dim.size)
        if is_float(x.dtype):
            # NaN equals nothing, and comes before whatever does.
            best = where(not_equal(x, x), places - dim.size, best)
        found = reduce_min(best, self.dim)
        return where(found < 0, found + dim.size, found) if is_float(x.dtype) else found


@dataclass(frozen=True)
class FirstExtreme(Reduce):
    """The largest or smallest along one dimension; the first of equal elements has all of the gradient."""

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        (x,), (name,) = inputs, self.dims
        place = (argmax if self.fn == "max" else argmin)(x, name)
        chosen = x.graph.apply(Range(x.shape.dim(name), "int32")).equal(place)
        return (where(chosen, dy, 0.0),)


@dataclass(frozen=True)
class TopK(Reduction):
    """The `best.size` largest elements along `dim`, largest first, and their int32 positions, along `best`.

    Equal elements are in the order of their positions. Where `dim` is split, every device finds its own
    largest, and the largest of those are taken.
    """

    dim: str
    best: Dim

    def roles(self, *inputs: TensorType) -> Roles:
        kept = inputs[0].shape.without(self.dim).names
        return Roles(
            parallel=kept,
            whole={
                self.dim: "the largest elements may be anywhere in the dimension",
                self.best.name: "the results are sorted",
            },
        )

    def infer(self, *inputs: TensorType) -> tuple[TensorType, TensorType]:
        (x,) = inputs
        size = x.shape.dim(self.dim).size
        if self.best.size > size:
            raise UserError(
                f"top_k of {x}: {self.best} elements are requested, but {self.dim!r} has only {size}"
            )
        if x.dtype == "bool":
            raise UserError(
                f"top_k of {x}: the tensor must contain numbers; cast it first, e.g. with .cast('int32')"
            )
        out = Shape([*x.shape.without(self.dim), self.best])
        return TensorType(out, x.dtype), TensorType(out, "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.top_k(_last(k, slices[0], at.inputs[0].shape, self.dim), self.best.size)

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * max(1, self.best.size.bit_length())

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Local candidates, gathered and compared; all elements are gathered only if all are candidates."""
        x = low.values[inputs[0]]
        splits = {n: low.layout.axes(n) for n in (*x.shape.names, self.best.name)}
        check_disjoint(splits, "top_k")
        ways = low.oracle.ways(splits[self.dim])
        kept = tuple(splits[n] for n in x.shape.without(self.dim).names)
        if ways == 1 or x.shape.dim(self.dim).size // ways <= self.best.size:
            whole = low.without(inputs[0], [self.dim])
            return low.local(self, [whole], types, [(*kept, ())] * 2)
        few = Dim(f"{self.best.name}_candidates", self.best.size * ways)
        shape = Shape([*x.shape.without(self.dim), few])
        found = low.local(
            Candidates(self.dim, self.best.size, few),
            inputs,
            [TensorType(shape, x.dtype), TensorType(shape, "int32")],
            [(*kept, splits[self.dim])] * 2,
        )
        gathered = [low.placed(i, (*kept, ())) for i in found]
        return low.local(BestOf(few.name, self.best), gathered, types, [(*kept, ())] * 2)

    def gradient(self, dy: Any, inputs: Sequence[Tensor], output: Any) -> Sequence[Tensor | None]:
        if dy[0] is None:
            return (None,)
        (x,) = inputs
        put = PutAlong(x.shape.dim(self.dim), x.shape.without(self.dim).names)
        return (x.graph.apply(put, dy[0], output[1]),)


@dataclass(frozen=True)
class Candidates(MadeByLowering, Reduction):
    """A device's own `count` largest along its piece of `dim`, with their positions in the whole, along
    `few`."""

    dim: str
    count: int
    few: Dim
    regroups: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> tuple[TensorType, TensorType]:
        out = Shape([*inputs[0].shape.without(self.dim), self.few])
        return TensorType(out, inputs[0].dtype), TensorType(out, "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        values, places = k.top_k(_last(k, slices[0], at.inputs[0].shape, self.dim), self.count)
        return values, k.binary("add", places, k.scalar(at.offset(self.dim), "int32"))

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * max(1, self.count.bit_length())


@dataclass(frozen=True)
class BestOf(MadeByLowering, Reduction):
    """The `best.size` largest of candidates (values, positions) along their last dimension."""

    dim: str
    best: Dim

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(
            parallel=inputs[0].shape.without(self.dim).names,
            whole={self.dim: "all candidates are compared", self.best.name: "the results are sorted"},
        )

    def infer(self, *inputs: TensorType) -> tuple[TensorType, TensorType]:
        out = Shape([*inputs[0].shape.without(self.dim), self.best])
        return TensorType(out, inputs[0].dtype), TensorType(out, "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        values, which = k.top_k(slices[0], self.best.size)
        shape = at.inputs[0].shape
        n, rows = shape.sizes[-1], shape.size // shape.sizes[-1]
        flat = k.binary("add", k.reshape(which, (rows, self.best.size)), row_starts(k, rows, n))
        places = k.take(k.reshape(slices[1], (shape.size,)), flat)
        return values, k.reshape(places, at.outputs[1].shape.sizes)

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * max(1, self.best.size.bit_length())


@dataclass(frozen=True)
class Sort(AlongWhole, Reduction):
    """The elements in order along one dimension, and their original int32 positions; equal elements keep
    their order.

    A split dimension is gathered. A sort between n devices that merges shards (Batcher 1968) has log2(n)
    (log2(n) + 1) / 2 rounds, in each of which a device sends its shard of the values and of their positions;
    a gather sends n - 1 shards of the values only. In float32 with n = 2, 4, 8, 16, 32 that is 2, 6, 12, 20,
    30 pieces against 1, 3, 7, 15, 31: below 32 devices the gather sends less.
    """

    descending: bool
    why: ClassVar[str] = "an element may move to any device"

    def infer(self, *inputs: TensorType) -> tuple[TensorType, TensorType]:
        (x,) = inputs
        x.shape.index(self.dim)
        if x.dtype == "bool":
            raise UserError(
                f"sort of {x}: the tensor must contain numbers; cast it first, e.g. with .cast('int32')"
            )
        return x, TensorType(x.shape, "int32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        shape = at.inputs[0].shape
        axis, last, n = shape.index(self.dim), len(shape) - 1, shape.dim(self.dim).size
        x = _last(k, slices[0], shape, self.dim)
        if self.descending:
            values, places = k.top_k(x, n)
        else:
            # Reversed before and after, so that equal elements keep their order.
            values, places = (k.flip(t, last) for t in k.top_k(k.flip(x, last), n))
            places = k.binary("sub", k.scalar(n - 1, "int32"), places)
        back = [last if i == axis else i - (i > axis) for i in range(len(shape))]
        return tuple(k.transpose(t, back) if axis != last else t for t in (values, places))

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size * max(1, local[0].shape.dim(self.dim).size.bit_length())

    def gradient(self, dy: Any, inputs: Sequence[Tensor], output: Any) -> Sequence[Tensor | None]:
        if dy[0] is None:
            return (None,)
        (x,) = inputs
        put = PutAlong(x.shape.dim(self.dim), x.shape.without(self.dim).names)
        moved = {self.dim: f"{self.dim}_sorted"}
        return (x.graph.apply(put, rename(dy[0], **moved), rename(output[1], **moved)),)


def _reversed(x: Tensor) -> Tensor:
    """x with the least element largest: -x, of whole numbers -1 - x, which none of them overflows."""
    if is_float(x.dtype):
        return -x
    if x.dtype == "bool":
        return logical_not(x)
    return binary("bit_xor", x, whole_numbers(x.dtype)[1] if x.dtype.startswith("u") else -1)


def argmax(x: Tensor, dim: Dim | str) -> Tensor:
    """int32 position of the first largest element along `dim`; of the first NaN if there is one."""
    return x.graph.apply(ArgMax(dim_name(dim)), x)


def argmin(x: Tensor, dim: Dim | str) -> Tensor:
    """int32 position of the first smallest element along `dim`; of the first NaN if there is one."""
    return argmax(_reversed(x), dim)


def first_extreme(fn: str, x: Tensor, dim: Dim | str) -> Tensor:
    """max or min along `dim`, as `FirstExtreme`."""
    found: Tensor = x.graph.apply(FirstExtreme(fn, (dim_name(dim),)), x)
    return found


def top_k(x: Tensor, dim: Dim | str, best: Dim) -> tuple[Tensor, Tensor]:
    """The `best.size` largest elements along `dim`, largest first, and their positions: both [others,
    best]."""
    values, places = x.graph.apply(TopK(dim_name(dim), best), x)
    return values, places


def top_1(x: Tensor, dim: Dim | str) -> tuple[Tensor, Tensor]:
    """The largest element along `dim` and its position."""
    return reduce_max(x, dim), argmax(x, dim)


def sort(x: Tensor, dim: Dim | str, descending: bool = False) -> Tensor:
    """The elements in order along `dim`."""
    values, _ = x.graph.apply(Sort(dim_name(dim), descending), x)
    out: Tensor = values
    return out


def argsort(x: Tensor, dim: Dim | str, descending: bool = False) -> Tensor:
    """int32 positions of the elements in order along `dim`."""
    _, places = x.graph.apply(Sort(dim_name(dim), descending), x)
    out: Tensor = places
    return out


def nth_largest(x: Tensor, n: int, dim: Dim | str) -> Tensor:
    """The element along `dim` with n other elements at least as large (n = 0: the largest)."""
    best = Dim(f"{dim_name(dim)}_best", n + 1)
    values = top_k(x, dim, best)[0]
    return reshape(slice_dim(values, best, n, 1), values.shape.without(best.name))


def nth_smallest(x: Tensor, n: int, dim: Dim | str) -> Tensor:
    """The element along `dim` with n other elements at most as large (n = 0: the smallest); NaN if there
    are at most n numbers.
    """
    if not is_float(x.dtype):
        return _reversed(nth_largest(_reversed(x), n, dim))
    number = x.equal(x)
    found = -nth_largest(where(number, -x, -math.inf), n, dim)
    return where(reduce_sum(number.cast("int32"), dim) > n, found, math.nan)


def reduce_first(x: Tensor, dim: Dim | str) -> Tensor:
    """The first element along `dim`, which disappears."""
    places = x.graph.apply(Range(x.shape.dim(dim_name(dim)), "int32"))
    return reduce_sum(where(places.equal(0), x, 0.0), dim)
