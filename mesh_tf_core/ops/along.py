"""Taking and putting elements along one dimension, by an index of their own for every position of the
others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mesh_tf_core.dims import Dim, Shape
from mesh_tf_core.errors import UserError
from mesh_tf_core.kernels.protocol import At, Kernel
from mesh_tf_core.op import Op, Roles, TensorType
from mesh_tf_core.ops.common import listing
from mesh_tf_core.ops.index import local_ids, need_ints

if TYPE_CHECKING:
    from mesh_tf_core.tensor import Tensor


def _ordered(k: Kernel, x: Any, shape: Shape, names: Sequence[str]) -> Any:
    order = [shape.index(n) for n in names]
    return k.transpose(x, order) if order != list(range(len(order))) else x


def row_starts(k: Kernel, rows: int, n: int) -> Any:
    """[rows 1]: where each row of a [rows n] array begins when it lies flat."""
    return k.reshape(k.binary("mul", k.iota(rows, "int32"), k.scalar(n, "int32")), (rows, 1))


@dataclass(frozen=True)
class TakeAlong(Op):
    """x [common, dim] at ids [common, more]: [common, more] in the order of the ids; 0 where an id is
    outside."""

    dim: str
    kind: ClassVar[str] = "gather"

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=inputs[1].shape.names, reduced=(self.dim,))

    def infer(self, *inputs: TensorType) -> TensorType:
        x, ids = inputs
        need_ints("take_along", ids)
        x.shape.index(self.dim)
        lacking = [d for d in x.shape if d.name != self.dim and d not in ids.shape.dims]
        if lacking or self.dim in ids.shape.names:
            raise UserError(
                f"take_along of {listing(inputs)}: ids need all dimensions of x but {self.dim!r}, which they "
                "may not have"
            )
        return TensorType(ids.shape, x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, ids = slices
        shape, wanted = at.inputs[0].shape, at.inputs[1].shape
        common = [n for n in wanted.names if n in shape.names]
        more = [n for n in wanted.names if n not in shape.names]
        rows, n = math.prod(wanted.dim(c).size for c in common), shape.dim(self.dim).size
        x = k.reshape(_ordered(k, x, shape, [*common, self.dim]), (rows * n,))
        flat = k.reshape(_ordered(k, ids, wanted, [*common, *more]), (rows, wanted.size // rows))
        relative, inside = local_ids(k, at, flat, self.dim, n)
        found = k.take(x, k.binary("add", relative, row_starts(k, rows, n)))
        found = k.where(inside, found, k.scalar(0, at.inputs[0].dtype))
        made = Shape(wanted.dim(name) for name in (*common, *more))
        return _ordered(k, k.reshape(found, made.sizes), made, wanted.names)

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, ids = inputs
        kept = tuple(n for n in x.shape.names if n != self.dim)
        return (dy.graph.apply(PutAlong(x.shape.dim(self.dim), kept), dy, ids), None)


@dataclass(frozen=True)
class PutAlong(Op):
    """Sums x [kept, more] to the places ids [kept, more] along `dim`: [kept, dim]. Ids outside are
    dropped."""

    dim: Dim
    kept: tuple[str, ...]
    kind: ClassVar[str] = "gather"

    def roles(self, *inputs: TensorType) -> Roles:
        more = tuple(n for n in inputs[1].shape.names if n not in self.kept)
        return Roles(parallel=(*self.kept, self.dim.name), reduced=more)

    def infer(self, *inputs: TensorType) -> TensorType:
        x, ids = inputs
        need_ints("put_along", ids)
        if set(x.shape.dims) != set(ids.shape.dims) or self.dim.name in x.shape.names:
            raise UserError(
                f"put_along of {listing(inputs)}: x and ids need the same dimensions, without "
                f"{self.dim.name!r}"
            )
        return TensorType(Shape([*(x.shape.dim(n) for n in self.kept), self.dim]), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, ids = slices
        out = at.outputs[0].shape
        n, rows = out.sizes[-1], math.prod(out.sizes[:-1])
        order = [*self.kept, *(name for name in at.inputs[1].shape.names if name not in self.kept)]
        flat = [
            k.reshape(_ordered(k, t, kind.shape, order), (rows, kind.shape.size // rows))
            for t, kind in zip((x, ids), at.inputs, strict=True)
        ]
        relative, inside = local_ids(k, at, flat[1], self.dim.name, n)
        places = k.binary("add", relative, row_starts(k, rows, n))
        places = k.where(inside, places, k.scalar(-1, "int32"))
        whole = (at.inputs[0].shape.size,)
        total = k.segment_sum(k.reshape(flat[0], whole), k.reshape(places, whole), rows * n)
        return k.reshape(total, out.sizes)

    def flops(self, *local: TensorType) -> float:
        return local[0].shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (take_along(dy, inputs[1], self.dim), None)


def take_along(x: Tensor, ids: Tensor, dim: Dim | str) -> Tensor:
    """x [common, dim] at index `ids` [common, more] along `dim`: [common, more]."""
    return x.graph.apply(TakeAlong(dim.name if isinstance(dim, Dim) else dim), x, ids)


def put_along(x: Tensor, ids: Tensor, dim: Dim, kept: Sequence[str]) -> Tensor:
    """Sums x to places `ids` along a new dimension `dim`; `kept` names the dimensions that stay."""
    return x.graph.apply(PutAlong(dim, tuple(kept)), x, ids)
