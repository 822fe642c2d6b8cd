"""One element along a dimension, read or written at a position that is known only when the program runs.

Where the dimension is split, the device that holds the position does the work: writing sends nothing, reading
joins one element. So a cache of keys and values is filled in place under any layout (see `decoding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.index import local_ids, need_ints
from mesh_tf_core.ops.kinds import Move, dim_name, listing
from mesh_tf_core.ops.shape import transpose


def _need_position(op: str, inputs: Sequence[TensorType]) -> None:
    position = inputs[-1]
    need_ints(op, position)
    if len(position.shape):
        raise UserError(
            f"{op} of {listing(inputs)}: the position must be a scalar, the same for all elements"
        )


def _element(k: Kernel, x: Any, sizes: Sequence[int], axis: int, place: Any) -> Any:
    """x at an index of one axis, which disappears."""
    begin = [place if i == axis else 0 for i in range(len(sizes))]
    found = k.slice(x, begin, [1 if i == axis else n for i, n in enumerate(sizes)])
    return k.reshape(found, [n for i, n in enumerate(sizes) if i != axis])


@dataclass(frozen=True)
class DynamicSlice(Move):
    """x [..., dim] at a position (int scalar): [...]; zeros where the position is outside."""

    dim: str
    kind: ClassVar[str] = "gather"

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=inputs[0].shape.without(self.dim).names, reduced=(self.dim,))

    def infer(self, *inputs: TensorType) -> TensorType:
        _need_position("dynamic_slice", inputs)
        return TensorType(inputs[0].shape.without(self.dim), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, position = slices
        local = at.inputs[0]
        axis = local.shape.index(self.dim)
        place, inside = local_ids(k, at, position, self.dim, local.shape.sizes[axis])
        found = _element(k, x, local.shape.sizes, axis, place)
        return k.where(inside, found, k.scalar(0, local.dtype))

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
        return 2.0 * outputs[0].bytes

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, position = inputs
        zeros = broadcast(constant_like(dy, 0.0), x.shape)
        return (dynamic_update(zeros, dy, position, self.dim), None)


@dataclass(frozen=True)
class DynamicUpdate(Move):
    """x [..., dim] with a piece [...] at a position (int scalar) of `dim`; x itself if that is outside."""

    dim: str
    in_place: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        x, piece, _ = inputs
        _need_position("dynamic_update", inputs)
        if piece != TensorType(x.shape.without(self.dim), x.dtype):
            raise UserError(
                f"dynamic_update of {listing(inputs)}: the piece must have the type of x without "
                f"dimension {self.dim!r}, {TensorType(x.shape.without(self.dim), x.dtype)}"
            )
        return x

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, piece, position = slices
        shape = at.inputs[0].shape
        axis = shape.index(self.dim)
        place, inside = local_ids(k, at, position, self.dim, shape.sizes[axis])
        # Devices that do not hold the position write what is there already: no copy of x, no branch.
        old = _element(k, x, shape.sizes, axis, place)
        return k.put(x, k.where(inside, piece, old), axis, place)

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
        return 3.0 * inputs[1].bytes

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        _, piece, position = inputs
        zeros = broadcast(constant_like(piece, 0.0), piece.shape)
        return (dynamic_update(dy, zeros, position, self.dim), dynamic_slice(dy, position, self.dim), None)


def dynamic_slice(x: Tensor, position: Tensor, dim: Dim | str) -> Tensor:
    """x at `position`, an int scalar tensor, along `dim`, which disappears; zeros if it is out of range."""
    return x.graph.apply(DynamicSlice(dim_name(dim)), x, position)


def dynamic_update(x: Tensor, piece: Tensor, position: Tensor, dim: Dim | str) -> Tensor:
    """Replaces x at `position`, an int scalar tensor, along `dim` by `piece`; x is unchanged if it is out
    of range.

    Args:
      piece: tensor with the dimensions of x except `dim`.
    """
    rest: Shape = x.shape.without(dim_name(dim))
    if piece.shape != rest and set(piece.shape.dims) == set(rest.dims):
        piece = transpose(piece, rest)
    return x.graph.apply(DynamicUpdate(dim_name(dim)), x, piece, position)
