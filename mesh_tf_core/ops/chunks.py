"""Chunks of a dimension that reach every device in turn, as products need them (`lower.collective_matmul`).

A chunk is the shard of a dimension on one device of a group that splits it. While chunks rotate, every device
holds a different one, so a chunk counts as a value without further splits, like the state of a pipeline's
stages. These operations are made by lowering only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType, Work
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.ops.kinds import Elementwise, MadeByLowering, Move
from mesh_tf_core.ops.pieces import resized
from mesh_tf_core.ops.stages import CalledOtherwise


@dataclass(frozen=True)
class ChunkAs(CalledOtherwise):
    """A device's chunk of `dim` as all that there is of it, or the inverse: `dim` has `size` elements then.
    Marks a pending sum over the group as taken, because every term of the chunk was added on its way."""

    dim: str
    size: int

    def infer(self, *inputs: TensorType) -> TensorType:
        return resized(inputs[0], self.dim, self.size)


@dataclass(frozen=True)
class ChunkNumber(MadeByLowering, Elementwise):
    """The chunk that a device works on, int32 scalar: its own number (int32 scalar), plus `far` positions
    round the group of `count`, plus `each` per step that the second operand (int32 scalar) counts, if there
    is one."""

    count: int
    far: int
    each: int = 0
    free: ClassVar[bool] = True
    element_flops: ClassVar[float] = 0.0

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        own, *turns = slices
        # Lowering counts back the long way round: libraries differ in remainders of negative numbers.
        number = k.binary("add", own, k.scalar(self.far, "int32"))
        for turn in turns:
            further = k.binary("mul", turn, k.scalar(self.each, "int32"))
            number = k.binary("add", number, further)
        return k.binary("mod", number, k.scalar(self.count, "int32"))


@dataclass(frozen=True)
class ChunkOf(MadeByLowering, Move):
    """x [..., dim] -> the chunk of `size` elements of `dim` with a number (int32 scalar)."""

    dim: str
    size: int
    kind: ClassVar[str] = "gather"
    linear: ClassVar[bool] = True
    cuts: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        return resized(inputs[0], self.dim, self.size)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, number = slices
        sizes, names = at.outputs[0].shape.sizes, at.outputs[0].shape.names
        begin = k.binary("mul", number, k.scalar(sizes[names.index(self.dim)], "int32"))
        return k.slice(x, [begin if n == self.dim else 0 for n in names], sizes)

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
        return 2.0 * outputs[0].bytes


@dataclass(frozen=True)
class ChunkFirst(MadeByLowering, Move):
    """A chunk of `dim` and its number (int32 scalar) -> `count` chunks, of which the others are 0."""

    dim: str
    count: int
    kind: ClassVar[str] = "gather"
    linear: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        return resized(inputs[0], self.dim, inputs[0].shape.dim(self.dim).size * self.count)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (chunk, number), (type,) = slices, at.outputs
        return _put(k, k.full(type.shape.sizes, 0, type.dtype), chunk, type.shape.index(self.dim), number)

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
        return float(2 * inputs[0].bytes + outputs[0].bytes)


@dataclass(frozen=True)
class ChunkPut(MadeByLowering, Move):
    """x [..., dim] with a chunk of `dim` at the place given by its number (int32 scalar).

    Attributes:
      product: a product makes the chunk, and may write it to its place.
    """

    dim: str
    product: bool = False
    linear: ClassVar[bool] = True
    in_place: ClassVar[bool] = True

    @property
    def cuts(self) -> bool:  # type: ignore[override]
        return self.product

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, chunk, number = slices
        return _put(k, x, chunk, at.inputs[0].shape.index(self.dim), number)

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
        return 2.0 * inputs[1].bytes


def _put(k: Kernel, x: Any, chunk: Any, axis: int, number: Any) -> Any:
    whole, size = tuple(x.shape), chunk.shape[axis]
    apart = (*whole[:axis], whole[axis] // size, size, *whole[axis + 1 :])
    return k.reshape(k.put(k.reshape(x, apart), chunk, axis, number), whole)


@dataclass(frozen=True)
class AddProduct(MadeByLowering):
    """A product of all operands but the last, added to that: one kernel, as the TPU compiler makes it."""

    product: Einsum
    kind: ClassVar[str] = "matmul"
    adds: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return self.product.roles(*inputs[:-1])

    def infer(self, *inputs: TensorType) -> TensorType:
        return self.product.infer(*inputs[:-1])

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        found = self.product.kernel(k, replace(at, inputs=at.inputs[:-1]), *slices[:-1])
        return k.binary("add", slices[-1], found)

    def flops(self, *local: TensorType) -> float:
        return self.product.flops(*local[:-1]) + local[-1].shape.size

    def work(self, *local: TensorType) -> Work:
        return Work(self.product.work(*local[:-1]).product)
