"""Stacks tensors along a new dimension, and splits a dimension."""

from collections.abc import Sequence

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.shape import concat, rename, reshape, slice_dim, transpose


def stack(xs: Sequence[Tensor], dim: str, axis: int = 0) -> Tensor:
    """Stacks tensors of one shape along a new dimension called `dim`, at position `axis`."""
    if not xs:
        raise UserError("stack: found no tensors; pass at least one")
    shape = xs[0].shape
    # Under a name of its own while it has one element: a layout that splits `dim` could not cut it.
    row = Dim(f"{dim}_stacked", 1)
    rows = [reshape(x, [row, *shape]) for x in (transpose(x, shape) for x in xs)]
    whole = rename(concat(rows, row), **{row.name: dim})
    order = [*shape.dims[:axis], whole.dim(dim), *shape.dims[axis:]]
    return transpose(whole, order)


def unstack(x: Tensor, dim: Dim | str) -> list[Tensor]:
    """Returns one tensor without `dim` per element of `dim`."""
    name = dim.name if isinstance(dim, Dim) else dim
    rest, apart = x.shape.without(name), f"{name}_unstacked"
    parts = split(rename(x, **{name: apart}), apart, x.shape.dim(name).size)
    return [reshape(part, rest) for part in parts]


def split(x: Tensor, dim: Dim | str, parts: int | Sequence[int]) -> list[Tensor]:
    """Splits `dim` into parts of equal or given sizes.

    Args:
      parts: number of equal parts, or the size of each.
    """
    name = dim.name if isinstance(dim, Dim) else dim
    total = x.shape.dim(name).size
    if isinstance(parts, int):
        if parts < 1 or total % parts:
            raise UserError(
                f"split of [{x.shape}]: the size of {name!r} is not divisible into {parts} equal parts; pad "
                "the tensor, or list the sizes of the parts"
            )
        parts = [total // parts] * parts
    if sum(parts) != total:
        raise UserError(
            f"split of [{x.shape}]: the parts {list(parts)} add up to {sum(parts)}, not to the size of "
            f"{name!r}, {total}"
        )
    out, begin = [], 0
    for size in parts:
        out.append(slice_dim(x, name, begin, size))
        begin += size
    return out


def squeeze(x: Tensor, dim: Dim | str) -> Tensor:
    """Removes a dimension of size 1."""
    name = dim.name if isinstance(dim, Dim) else dim
    if x.shape.dim(name).size != 1:
        raise UserError(
            f"squeeze of [{x.shape}]: {name!r} has more than one element; select one with mtf.slice_dim, or "
            "use mtf.reshape"
        )
    return reshape(x, Shape(d for d in x.shape if d.name != name))


def strided(x: Tensor, dim: Dim | str, stride: int) -> Tensor:
    """Every `stride`-th element along `dim`, including the first; a split dimension stays split.

    Raises:
      UserError: the size is not a multiple of `stride`.
    """
    name = dim.name if isinstance(dim, Dim) else dim
    at, size = x.shape.index(name), x.shape.dim(name).size
    if stride < 1 or size % stride:
        raise UserError(
            f"strided [{x.shape}]: the stride {stride} must divide the size of {name!r}, {size}; pad the "
            "tensor first"
        )
    phase = Dim(f"{name}_phase", stride)
    apart = reshape(x, [*x.shape.dims[:at], Dim(name, size // stride), phase, *x.shape.dims[at + 1 :]])
    return squeeze(slice_dim(apart, phase, 0, 1), phase)
