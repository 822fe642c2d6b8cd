"""Windows over a split dimension that reach into neighbours' pieces.

These operations are made by lowering only. The dimension keeps its name and its split; its size is that of
all devices' windows laid end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim, PaddedDim
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ops.kinds import MadeByLowering, Move


@lru_cache(maxsize=1 << 12)
def resized(x: TensorType, dim: str, size: int) -> TensorType:
    """The type with another size for one dimension."""
    return TensorType(x.shape.resized(Dim(dim, size)), x.dtype)


@dataclass(frozen=True)
class PieceSlice(MadeByLowering, Move):
    """Elements begin .. begin+size-1 of a device's piece of `dim`."""

    dim: str
    begin: int
    size: int
    pieces: int

    def infer(self, *inputs: TensorType) -> TensorType:
        return resized(inputs[0], self.dim, self.size * self.pieces)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        begin = [self.begin if n == self.dim else 0 for n in at.inputs[0].shape.names]
        return k.slice(slices[0], begin, at.outputs[0].shape.sizes)


@dataclass(frozen=True)
class PieceJoin(MadeByLowering, Move):
    """A device's pieces end to end along `dim`, with zeros before and after."""

    dim: str
    before: int
    after: int
    pieces: int

    def infer(self, *inputs: TensorType) -> TensorType:
        total = sum(t.shape.dim(self.dim).size for t in inputs)
        return resized(inputs[0], self.dim, total + (self.before + self.after) * self.pieces)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        axis = at.inputs[0].shape.index(self.dim)
        x = k.concat(slices, axis) if len(slices) > 1 else slices[0]
        if not self.before and not self.after:
            return x
        return k.pad(x, [(self.before, self.after) if i == axis else (0, 0) for i in range(len(x.shape))])


@dataclass(frozen=True)
class PadPieces(MadeByLowering, Move):
    """A device's own shard of a dimension with zeros behind it, as `PaddedDim` describes.

    It costs nothing: the kernel that makes the piece writes it into the longer array.
    """

    dim: PaddedDim
    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape.resized(self.dim), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        sizes, wanted = at.inputs[0].shape.sizes, at.outputs[0].shape.sizes
        return k.pad(slices[0], [(0, more - size) for size, more in zip(sizes, wanted, strict=True)])


@dataclass(frozen=True)
class CutPadding(MadeByLowering, Move):
    """The inverse: the elements of a device's own piece that count, which readers take where they lie."""

    dim: PaddedDim
    free: ClassVar[bool] = True
    cuts: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape.resized(self.dim.plain), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.slice(slices[0], [0] * len(at.outputs[0].shape), at.outputs[0].shape.sizes)


def window(low: Emitter, id: int, dim: str, begin: int, end: int, wrap: bool = False) -> int:
    """Every device's elements begin .. end-1 of `dim`, counted from the start of its own shard.

    Elements of other shards come from their devices, at any distance; beyond the ends of the dimension are
    zeros, or with `wrap` the opposite end. At least one device must have an element of the dimension in its
    window.
    """
    v = low.values[id]
    axes = v.split_of(dim)
    count = low.oracle.ways(axes)
    size = v.shape.dim(dim).size // count
    parts: list[int] = []
    before = after = 0
    for far in range(begin // size, -(-end // size)):
        first, last = max(begin - far * size, 0), min(end - far * size, size)
        if not wrap and abs(far) >= count:
            before, after = (before + last - first, after) if far < 0 else (before, after + last - first)
            continue
        whole = last - first == size
        part = id if whole else low.applied(PieceSlice(dim, first, last - first, count), id)
        parts.append(_moved(low, part, axes, -far, wrap))
    if len(parts) == 1 and not before and not after:
        return parts[0]
    return low.applied(PieceJoin(dim, before, after, count), *parts, splits=v.splits)


def _moved(low: Emitter, id: int, axes: tuple[str, ...], shift: int, wrap: bool) -> int:
    count = low.oracle.ways(axes)
    shift = (shift + count // 2) % count - count // 2 if wrap else shift
    return low.sent(id, axes, shift, wrap) if shift else id
