"""Running sums along one dimension, and products along several, also where they are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.kinds import MadeByLowering, Reduction
from mesh_tf_core.ops.reduce import names_of, reduce_sum


@dataclass(frozen=True)
class CumSum(Reduction):
    """Sums of all elements up to each one along a dimension (`exclusive`: before it; `reverse`: from the
    end)."""

    dim: str
    exclusive: bool
    reverse: bool

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        x.shape.index(self.dim)
        if x.dtype == "bool":
            raise UserError(
                f"cumsum of {x}: the tensor must contain numbers; cast it first, e.g. with .cast('int32')"
            )
        return x

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.cumsum(slices[0], at.inputs[0].shape.index(self.dim), self.exclusive, self.reverse)

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Running sums of each piece, plus the totals of the pieces before it."""
        x = low.values[inputs[0]]
        axes = x.split_of(self.dim)
        ways = low.oracle.ways(axes)
        if ways == 1:
            return low.local(self, inputs, types, [x.splits])
        pieces = Dim(f"{self.dim}_pieces", ways)
        at = x.shape.index(self.dim)
        total = PieceTotals(self.dim, pieces)
        totals = low.local(total, inputs, [total.infer(TensorType(x.shape, x.dtype))], [x.splits])
        whole = low.placed(totals[0], tuple(() if i == at else s for i, s in enumerate(x.splits)))
        running = CumSumAfter(self.dim, pieces.name, self.exclusive, self.reverse)
        return low.local(running, [inputs[0], whole], types, [x.splits])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(CumSum(self.dim, self.exclusive, not self.reverse), dy),)


@dataclass(frozen=True)
class PieceTotals(Reduction, MadeByLowering):
    """The sum of a device's piece of `dim`, as its one element of the dimension `pieces`."""

    dim: str
    pieces: Dim
    regroups: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        wide = "float32" if itemsize(x.dtype) == 2 else x.dtype  # totals of 16 bits would lose small terms
        return TensorType(Shape(self.pieces if d.name == self.dim else d for d in x.shape), wide)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        total = k.reduce("sum", k.cast(slices[0], at.outputs[0].dtype), [at.inputs[0].shape.index(self.dim)])
        return k.reshape(total, at.outputs[0].shape.sizes)


@dataclass(frozen=True)
class CumSumAfter(MadeByLowering, Reduction):
    """Running sums of a piece plus the totals of the pieces before it (`reverse`: after it)."""

    dim: str
    pieces: str
    exclusive: bool
    reverse: bool
    element_flops: ClassVar[float] = 2.0

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(
            parallel=inputs[0].shape.names, whole={self.pieces: "the totals of all earlier pieces are added"}
        )

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, totals = slices
        axis, n = at.inputs[0].shape.index(self.dim), at.inputs[1].shape.dim(self.pieces).size
        wide = at.inputs[1].dtype
        running = k.cumsum(k.cast(x, wide), axis, self.exclusive, self.reverse)
        place = k.scalar(at.shard(self.dim), "int32")
        before = k.binary("gt" if self.reverse else "lt", k.iota(n, "int32"), place)
        sizes = [n if i == axis else 1 for i in range(len(at.inputs[0].shape))]
        wanted = k.where(k.reshape(before, sizes), totals, k.scalar(0, wide))
        offset = k.reduce("sum", wanted, [axis])
        kept = [1 if i == axis else s for i, s in enumerate(at.inputs[0].shape.sizes)]
        return k.cast(k.binary("add", running, k.reshape(offset, kept)), at.outputs[0].dtype)


def cumsum(x: Tensor, dim: Dim | str, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Cumulative sum along `dim`; `exclusive` leaves out the element itself, `reverse` starts at the end."""
    return x.graph.apply(CumSum(dim.name if isinstance(dim, Dim) else dim, exclusive, reverse), x)


@dataclass(frozen=True)
class ReduceProd(Reduction):
    """The product of all elements over `dims`; of split dimensions, devices exchange their own products."""

    dims: tuple[str, ...]

    def roles(self, *inputs: TensorType) -> Roles:
        kept = tuple(n for n in inputs[0].shape.names if n not in self.dims)
        return Roles(parallel=kept, whole=dict.fromkeys(self.dims, "all of its elements are multiplied"))

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        for name in self.dims:
            x.shape.index(name)
        if x.dtype == "bool":
            raise UserError(
                f"reduce_prod of {x}: the tensor must contain numbers; for bool, use mtf.reduce_all"
            )
        return TensorType(x.shape.without(*self.dims), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.reduce("prod", slices[0], [at.inputs[0].shape.index(n) for n in self.dims])

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        x = low.values[inputs[0]]
        axes = tuple(a for name in self.dims for a in x.split_of(name))
        kept = tuple(s for n, s in zip(x.shape.names, x.splits, strict=True) if n not in self.dims)
        if not axes:
            return low.local(self, inputs, types, [kept])
        pieces = Dim(f"{self.dims[0]}_products", low.oracle.ways(axes))
        own = TensorType(Shape([*types[0].shape, pieces]), x.dtype)
        (made,) = low.local(PieceProducts(self.dims, pieces), inputs, [own], [(*kept, axes)])
        return low.local(ReduceProd((pieces.name,)), [low.placed(made, (*kept, ()))], types, [kept])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        """The product of the other factors: if one factor is zero, only it has a gradient; if two are, none
        has."""
        (x,) = inputs
        zero = x.equal(0)
        count = reduce_sum(zero.cast("int32"), self.dims)
        nonzero = where(zero, 1, x)
        rest = x.graph.apply(ReduceProd(self.dims), nonzero) * dy
        nothing = constant_like(x, 0.0)
        alone = where(count.equal(1), rest, nothing)
        return (where(zero, alone, where(count.equal(0), rest, nothing) / nonzero),)


@dataclass(frozen=True)
class PieceProducts(Reduction, MadeByLowering):
    """The product of a device's piece over `dims`, as its one element of the last dimension `pieces`."""

    dims: tuple[str, ...]
    pieces: Dim
    regroups: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        return TensorType(Shape([*x.shape.without(*self.dims), self.pieces]), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        product = k.reduce("prod", slices[0], [at.inputs[0].shape.index(n) for n in self.dims])
        return k.reshape(product, at.outputs[0].shape.sizes)


def reduce_prod(x: Tensor, dims: Dim | str | Sequence[Dim | str] | None = None) -> Tensor:
    """Product over `dims` (None: all)."""
    names = names_of(x, dims)
    return x.graph.apply(ReduceProd(names), x) if names else x
