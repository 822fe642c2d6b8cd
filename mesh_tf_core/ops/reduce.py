"""Reductions: sums, means, extremes, any and all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.kinds import Reduction, need_fractions

_COMBINE = {"sum": "sum", "max": "max", "min": "min", "any": "max", "all": "min"}


@dataclass(frozen=True)
class Reduce(Reduction):
    """Reduces the named dimensions by `fn` (sum, max, min, any, all); the others keep their order."""

    fn: str
    dims: tuple[str, ...]

    @property
    def name(self) -> str:
        return "reduce_" + self.fn

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.fn == "sum"

    def __post_init__(self) -> None:
        if self.fn not in _COMBINE:
            raise UserError(f"unknown reduction {self.fn!r}; {known_names(self.fn, _COMBINE)}")

    def roles(self, *inputs: TensorType) -> Roles:
        kept = tuple(n for n in inputs[0].shape.names if n not in self.dims)
        return Roles(parallel=kept, reduced=self.dims, combine=_COMBINE[self.fn])

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        for name in self.dims:
            x.shape.index(name)
        if (x.dtype == "bool") != (self.fn in ("any", "all")):
            raise UserError(
                f"{self.name} of {x}: reduce_any and reduce_all need a bool tensor, all other reductions "
                "need numbers; cast the tensor first"
            )
        return TensorType(x.shape.without(*self.dims), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.reduce(self.fn, slices[0], [at.inputs[0].shape.index(n) for n in self.dims])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        (x,) = inputs
        if self.fn == "sum":
            return (broadcast(dy, x.shape),)
        if self.fn in ("any", "all"):
            return (None,)
        chosen = x.equal(output).cast(x.dtype)
        return (chosen * (dy / reduce_sum(chosen, self.dims)),)

    def unreduced(self, dim: Dim, inputs: Sequence[Tensor]) -> Tensor | None:
        if self.fn != "sum":
            return None
        found = reduce_sum(inputs[0], [n for n in self.dims if n != dim.name])
        return broadcast(found, [dim, *found.shape.without(dim.name)])


def names_of(x: Tensor, dims: Dim | str | Sequence[Dim | str] | None) -> tuple[str, ...]:
    """The names of the dimensions meant (None: all)."""
    if dims is None:
        return x.shape.names
    listed = [dims] if isinstance(dims, Dim | str) else list(dims)
    return tuple(d.name if isinstance(d, Dim) else d for d in listed)


def _reduce(fn: str, x: Tensor, dims: Dim | str | Sequence[Dim | str] | None) -> Tensor:
    names = names_of(x, dims)
    return x.graph.apply(Reduce(fn, names), x) if names else x


def reduce_sum(x: Tensor, dims: Dim | str | Sequence[Dim | str] | None = None) -> Tensor:
    """Sum over `dims` (None: all).

    Example:
      >>> import mesh_tf_core as mtf
      >>> x = mtf.Graph("g").input("x", [mtf.Dim("batch", 8), mtf.Dim("d_model", 4)], "float32")
      >>> print(mtf.reduce_sum(x, ["batch"]).shape)
      d_model:4
    """
    return _reduce("sum", x, dims)


def reduce_mean(x: Tensor, dims: Dim | str | Sequence[Dim | str] | None = None) -> Tensor:
    """Mean over `dims` (None: all): a sum divided by the global number of elements."""
    count = math.prod(x.shape.dim(name).size for name in names_of(x, dims))
    need_fractions("reduce_mean", x.type)
    return reduce_sum(x, dims) * (1.0 / count)


def reduce_max(x: Tensor, dims: Dim | str | Sequence[Dim | str] | None = None) -> Tensor:
    """Largest element over `dims` (None: all)."""
    return _reduce("max", x, dims)


def reduce_min(x: Tensor, dims: Dim | str | Sequence[Dim | str] | None = None) -> Tensor:
    """Smallest element over `dims` (None: all)."""
    return _reduce("min", x, dims)


def reduce_any(x: Tensor, dims: Dim | str | Sequence[Dim | str] | None = None) -> Tensor:
    """True where any element over `dims` is True (None: all dims)."""
    return _reduce("any", x, dims)


def reduce_all(x: Tensor, dims: Dim | str | Sequence[Dim | str] | None = None) -> Tensor:
    """True where all elements over `dims` are True (None: all dims)."""
    return _reduce("all", x, dims)


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Sums out the dimensions that `shape` lacks: the gradient of a broadcast."""
    return reduce_sum(x, [n for n in x.shape.names if n not in shape.names])
