"""Values, their pieces and their origins: the operands of instructions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import TensorType, itemsize
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase

Splits = tuple[Axes, ...]
"""For every dimension of a value, the mesh axes that it is split over."""


@lru_cache(maxsize=1 << 16)
def local_type(shape: Shape, dtype: str, splits: tuple[Axes, ...], mesh: Mesh) -> TensorType:
    """Type of the piece on one device of a value."""
    dims = [d.part(mesh.group_size(axes)) if axes else d for d, axes in zip(shape, splits, strict=True)]
    return TensorType(Shape(dims), dtype)


@lru_cache(maxsize=1 << 16)
def _ways(splits: tuple[Axes, ...], mesh: Mesh) -> int:
    return math.prod(mesh.size(a) for axes in splits for a in axes)


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a program, one piece of it on every device.

    Attributes:
      shape: the global shape.
      splits: for every dimension, the mesh axes it is split over.
      partial: axes over which pieces must still be added up.
      tensor: the graph's tensor that this is, -1 for values that lowering made.
      host: the pieces lie in the memory of the devices' hosts.
    """

    id: int
    shape: Shape
    dtype: str
    splits: tuple[Axes, ...]
    partial: Axes = ()
    tensor: int = -1
    host: bool = False

    def local(self, mesh: Mesh) -> TensorType:
        """Type of the piece on one device."""
        return local_type(self.shape, self.dtype, self.splits, mesh)

    def local_bytes(self, mesh: Mesh) -> int:
        if self.shape.sparse is not None:
            return self.local(mesh).bytes
        return self.shape.size // _ways(self.splits, mesh) * itemsize(self.dtype)

    def begin(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Index of the first element of a device's piece, per dimension."""
        sizes = self.local(mesh).shape.sizes
        return tuple(mesh.group_index(rank, axes) * n for axes, n in zip(self.splits, sizes, strict=True))

    def of(self, tensor: int) -> Value:
        """The same as a tensor of the graph."""
        if self.tensor == tensor:
            return self
        return Value(self.id, self.shape, self.dtype, self.splits, self.partial, tensor, self.host)

    def split_of(self, name: str) -> Axes:
        return self.splits[self.shape.index(name)]

    def __str__(self) -> str:
        dims = " ".join(
            f"{d}" + (f"/{'+'.join(axes)}" if axes else "")
            for d, axes in zip(self.shape, self.splits, strict=True)
        )
        partial = f" partial({'+'.join(self.partial)})" if self.partial else ""
        return f"{self.dtype}[{dims}]{partial}{' on host' if self.host else ''}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an instruction: graph node, the model's scope, phase."""

    node: int
    scope: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction: value ids in, value ids out."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    origin: Origin

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def parameters(self) -> str:
        """The text in brackets after its name."""
        return ""

    def text(self) -> str:
        """Name and parameters."""
        return f"{self.name}({self.parameters()})" if self.parameters() else self.name
