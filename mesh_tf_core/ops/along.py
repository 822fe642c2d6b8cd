"""Takes and puts elements along one dimension, with an index for every position of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.convgrid import ordered
from mesh_tf_core.ops.index import local_ids, need_ints
from mesh_tf_core.ops.kinds import Move, Reduction, listing


def row_starts(k: Kernel, rows: int, n: int) -> Any:
    """[rows 1]: start of each row of a [rows n] array when it is flattened."""
    return k.reshape(k.binary("mul", k.iota(rows, "int32"), k.scalar(n, "int32")), (rows, 1))


def _rows(x: Shape, ids: Shape) -> list[Dim]:
    """The dimensions that x has and the ids lack: they move together."""
    return [d for d in x if d.name not in ids.names]


@dataclass(frozen=True)
class TakeAlong(Move):
    """x [common, dim, rows] at ids [common, more]: [the ids' dimensions, rows]; 0 where an id is outside."""

    dim: str
    kind: ClassVar[str] = "gather"

    def roles(self, *inputs: TensorType) -> Roles:
        rows = (d.name for d in _rows(inputs[0].shape.without(self.dim), inputs[1].shape))
        return Roles(parallel=(*inputs[1].shape.names, *rows), reduced=(self.dim,))

    def infer(self, *inputs: TensorType) -> TensorType:
        x, ids = inputs
        need_ints("take_along", ids)
        x.shape.index(self.dim)
        common = [d for d in x.shape if d.name in ids.shape.names]
        if self.dim in ids.shape.names or any(d not in ids.shape.dims for d in common):
            raise UserError(
                f"take_along of {listing(inputs)}: the ids must not have dimension {self.dim!r}, and "
                "dimensions that they share with x must have the same size"
            )
        return TensorType(Shape([*ids.shape, *_rows(x.shape.without(self.dim), ids.shape)]), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, ids = slices
        shape, wanted = at.inputs[0].shape, at.inputs[1].shape
        common = [n for n in wanted.names if n in shape.names]
        more = [n for n in wanted.names if n not in shape.names]
        rows = _rows(shape.without(self.dim), wanted)
        width = [math.prod(d.size for d in rows)] if rows else []
        count, n = math.prod(wanted.dim(c).size for c in common), shape.dim(self.dim).size
        order = [*common, self.dim, *(d.name for d in rows)]
        x = k.reshape(ordered(k, x, shape, order), (count * n, *width))
        flat = k.reshape(ordered(k, ids, wanted, [*common, *more]), (count, wanted.size // count))
        relative, inside = local_ids(k, at, flat, self.dim, n)
        found = k.take(x, k.binary("add", relative, row_starts(k, count, n)))
        inside = k.reshape(inside, (count, wanted.size // count, *(1 for _ in width)))
        found = k.where(inside, found, k.scalar(0, at.inputs[0].dtype))
        made = Shape([*(wanted.dim(name) for name in (*common, *more)), *rows])
        return ordered(k, k.reshape(found, made.sizes), made, [*wanted.names, *(d.name for d in rows)])

    def labels(self, *inputs: TensorType) -> tuple[int, Dim, bool]:
        return 1, inputs[0].shape.dim(self.dim), True

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, ids = inputs
        kept = tuple(n for n in x.shape.names if n != self.dim)
        return (dy.graph.apply(PutAlong(x.shape.dim(self.dim), kept), dy, ids), None)


@dataclass(frozen=True)
class PutAlong(Reduction):
    """Sums x [kept, more, rows] to the places ids [kept, more] along `dim`: [kept, dim, rows].

    Ids outside are dropped. Dimensions that the ids lack are rows, and need not be named in `kept`.

    Attributes:
      most: the largest element of each place instead; -inf where there is none.
    """

    dim: Dim
    kept: tuple[str, ...]
    most: bool = False
    kind: ClassVar[str] = "gather"

    @property
    def still(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.kept

    def roles(self, *inputs: TensorType) -> Roles:
        more = tuple(n for n in inputs[1].shape.names if n not in self.kept)
        rows = (d.name for d in _rows(inputs[0].shape, inputs[1].shape))
        combine = "max" if self.most else "sum"
        return Roles((*self._kept(inputs[1]), self.dim.name, *rows), more, combine)

    def infer(self, *inputs: TensorType) -> TensorType:
        x, ids = inputs
        need_ints("put_along", ids)
        if not set(ids.shape.dims) <= set(x.shape.dims) or self.dim.name in x.shape.names:
            raise UserError(
                f"put_along of {listing(inputs)}: x must have all dimensions of the ids, but not "
                f"{self.dim.name!r}"
            )
        kept = (x.shape.dim(n) for n in self._kept(ids))
        return TensorType(Shape([*kept, self.dim, *_rows(x.shape, ids.shape)]), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, ids = slices
        out, (given, wanted) = at.outputs[0].shape, (t.shape for t in at.inputs)
        kept, rows = self._kept(at.inputs[1]), _rows(given, wanted)
        n, count = out.dim(self.dim.name).size, math.prod(out.dim(name).size for name in kept)
        order = [*kept, *(name for name in wanted.names if name not in kept)]
        flat = k.reshape(ordered(k, ids, wanted, order), (count, wanted.size // count))
        relative, inside = local_ids(k, at, flat, self.dim.name, n)
        places = k.binary("add", relative, row_starts(k, count, n))
        places = k.reshape(k.where(inside, places, k.scalar(-1, "int32")), (wanted.size,))
        width = [math.prod(d.size for d in rows)] if rows else []
        x = k.reshape(ordered(k, x, given, [*order, *(d.name for d in rows)]), (wanted.size, *width))
        return k.reshape(k.segment_sum(x, places, count * n, self.most), out.sizes)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, ids = inputs
        slope = take_along(dy, ids, self.dim)
        if self.most:  # those that are equal share it
            hit = x.equal(take_along(output, ids, self.dim)).cast(x.dtype)
            count = put_along(hit, ids, self.dim, self.kept)
            slope = hit * slope / (take_along(count, ids, self.dim) + (1.0 - hit))
        return (slope, None)

    def _kept(self, ids: TensorType) -> tuple[str, ...]:
        return tuple(n for n in self.kept if n in ids.shape.names)


def take_along(x: Tensor, ids: Tensor, dim: Dim | str) -> Tensor:
    """x [common, dim, rows] at index `ids` [common, more] along `dim`: [the ids' dimensions, rows]."""
    return x.graph.apply(TakeAlong(dim.name if isinstance(dim, Dim) else dim), x, ids)


def put_along(x: Tensor, ids: Tensor, dim: Dim, kept: Sequence[str], most: bool = False) -> Tensor:
    """Adds x to the places `ids` along a new dimension `dim`: [kept, dim, dimensions of x that ids lacks].

    Args:
      kept: names of the dimensions of ids that stay; the others are summed out.
      most: take the largest element of each place instead of the sum; -inf where there is none.
    """
    return x.graph.apply(PutAlong(dim, tuple(kept), most), x, ids)
