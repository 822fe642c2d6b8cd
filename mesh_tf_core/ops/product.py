"""Products along dimensions, also where they are split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Emitter, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.kinds import MadeByLowering, Reduction
from mesh_tf_core.ops.reduce import names_of, reduce_sum


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
