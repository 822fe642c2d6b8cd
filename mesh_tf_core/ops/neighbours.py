"""Moves elements along a dimension; if it is split, only elements that cross a border are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import binary
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.index import Range, gather
from mesh_tf_core.ops.kinds import Move
from mesh_tf_core.ops.pieces import window
from mesh_tf_core.ops.shape import concat, rename, slice_dim, transpose


@dataclass(frozen=True)
class ShiftAlong(Move):
    """Element i moves to place i + offset of `dim`; elements that leave one end enter the other (`wrap`) or
    are lost."""

    dim: str
    offset: int
    wrap: bool

    def infer(self, *inputs: TensorType) -> TensorType:
        inputs[0].shape.index(self.dim)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (x,), shape = slices, at.inputs[0].shape
        axis, size = shape.index(self.dim), shape.dim(self.dim).size
        cut = -self.offset % size if self.wrap else max(-self.offset, 0)
        kept = [
            size - abs(self.offset) if i == axis and not self.wrap else s for i, s in enumerate(shape.sizes)
        ]
        start = [cut if i == axis else 0 for i in range(len(shape))]
        if not self.wrap:
            ends = (max(self.offset, 0), max(-self.offset, 0))
            return k.pad(k.slice(x, start, kept), [ends if i == axis else (0, 0) for i in range(len(shape))])
        if not cut:
            return x
        tail = [size - cut if i == axis else s for i, s in enumerate(shape.sizes)]
        head = [cut if i == axis else s for i, s in enumerate(shape.sizes)]
        return k.concat([k.slice(x, start, tail), k.slice(x, [0] * len(shape), head)], axis)

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """A split dimension: the window of every piece, moved against the offset."""
        x = low.values[inputs[0]]
        count = low.oracle.ways(x.split_of(self.dim))
        if count == 1:
            return low.local(self, inputs, types, [x.splits])
        size = x.shape.dim(self.dim).size // count
        # Devices that have the same whole piece to send send a part each, and gather what they get.
        parts = x.splits if self.offset % size else low.parted(inputs[0], self.dim)
        part = low.placed(inputs[0], parts)
        return [
            low.placed(window(low, part, self.dim, -self.offset, size - self.offset, self.wrap), x.splits)
        ]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (shift(dy, -self.offset, self.dim, self.wrap),)


@dataclass(frozen=True)
class ReverseAlong(Move):
    """The elements of `dim` in the opposite order."""

    dim: str

    def infer(self, *inputs: TensorType) -> TensorType:
        inputs[0].shape.index(self.dim)
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.flip(slices[0], at.inputs[0].shape.index(self.dim))

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Every piece is turned, and goes to the device as far from the other end."""
        x, (moved,) = low.values[inputs[0]], inputs
        if (count := low.oracle.ways(axes := x.split_of(self.dim))) > 1:
            moved = low.sent(moved, axes, pairs=tuple((i, count - 1 - i) for i in range(count)))
        return [moved] if x.shape.dim(self.dim).size == count else low.local(self, [moved], types, [x.splits])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(self, dy),)


def shift(x: Tensor, offset: int, dim: Dim | str, wrap: bool = False) -> Tensor:
    """Moves element i of `dim` to place i + offset; zeros enter, or with `wrap` the elements that leave."""
    name = dim.name if isinstance(dim, Dim) else dim
    size = x.shape.dim(name).size
    offset = offset % size if wrap else offset
    if not offset:
        return x
    if abs(offset) >= size:
        return broadcast(constant_like(x, 0.0), x.shape)
    return x.graph.apply(ShiftAlong(name, offset, wrap), x)


def dynamic_shift(x: Tensor, offset: Tensor, dim: Dim | str, wrap: bool = False) -> Tensor:
    """Shifts x as `shift` does, by an int32 scalar that is computed at run time."""
    name = dim.name if isinstance(dim, Dim) else dim
    size, moved = x.shape.dim(name).size, f"{name}_shifted"
    source = x.graph.apply(Range(Dim(moved, size), "int32")) - offset
    source = binary("mod", source, size) if wrap else source
    return transpose(rename(gather(x, source, name), **{moved: name}), x.shape)


def halo_exchange(
    x: Tensor, blocks: Dim | str, block: Dim | str, before: int, after: int, wrap: bool = False
) -> Tensor:
    """x [others, blocks, block] with every block extended by elements of its neighbours.

    Args:
      blocks: dimension that counts the blocks; if it is split, neighbouring devices exchange elements.
      block: dimension of one block's elements; its new size is `before` + size + `after`.
      before, after: number of elements of the previous and the next block, at most the size of a block; zeros
        at the two ends, or with `wrap` the opposite end.
    """
    outer, inner = (d.name if isinstance(d, Dim) else d for d in (blocks, block))
    size = x.shape.dim(inner).size
    if not 0 <= before <= size or not 0 <= after <= size:
        raise UserError(
            f"halo_exchange of [{x.shape}]: before={before} and after={after} must each be from 0 to the "
            f"size of {inner!r}, {size}"
        )
    left = [shift(slice_dim(x, inner, size - before, before), 1, outer, wrap)] if before else []
    right = [shift(slice_dim(x, inner, 0, after), -1, outer, wrap)] if after else []
    return concat([*left, x, *right], inner)
