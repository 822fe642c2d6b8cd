"""Operations that move elements: rename, reshape, concat, slice, pad.

Along a split dimension concat, slice and pad send only elements that change devices (`rearrange`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.kinds import AlongWhole, Move, align, check_number, dim_name, listing, same_dtype
from mesh_tf_core.ops.rearrange import rearranged


@dataclass(frozen=True)
class Rename(Move):
    """The same elements under other dimension names: (old, new) pairs. The layout may split old and new
    differently."""

    names: tuple[tuple[str, str], ...]
    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    regroups: ClassVar[bool] = True

    @property
    def renames(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return self.names

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        for old, _ in self.names:
            x.shape.index(old)
        new = dict(self.names)
        return TensorType(Shape(Dim(new[d.name], d.size) if d.name in new else d for d in x.shape), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return slices[0]

    def lower(self, lowering: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Moves the pieces to where the new names want them, then renames in place."""
        moved = lowering.placed(inputs[0], lowering.natural(types[0].shape))
        return lowering.local(self, [moved], types, [lowering.natural(types[0].shape)])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        back = Rename(tuple((new, old) for old, new in self.names))
        return (dy.graph.apply(back, dy),)


@dataclass(frozen=True)
class Reshape(Move):
    """The elements in row-major order under another shape of the same size."""

    output: Shape
    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    regroups: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        kept = tuple(d.name for d in inputs[0].shape if d in self.output.dims)
        names = dict.fromkeys((*inputs[0].shape.names, *self.output.names))
        return Roles(
            parallel=kept,
            whole={n: "the elements of this dimension are regrouped" for n in names if n not in kept},
        )

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        if x.shape.size != self.output.size:
            raise UserError(
                f"reshape of {x} ({x.shape.size} elements) to [{self.output}] ({self.output.size} "
                "elements): both shapes must have the same number of elements"
            )
        return TensorType(self.output, x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.reshape(slices[0], at.outputs[0].shape.sizes)

    def lower(self, lowering: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Group by group of dimensions that are regrouped: only a split of a group's first dimension
        survives."""
        value = lowering.values[inputs[0]]
        have, out = dict(zip(value.shape.names, value.splits, strict=True)), {}
        for before, after in groups(value.shape, self.output):
            if [d.name for d in before] == [d.name for d in after]:
                out.update({d.name: have[d.name] for d in after})
                continue
            first = have[before[0].name] if before else ()
            fits = bool(after) and after[0].size % lowering.oracle.ways(first) == 0
            for i, d in enumerate(before):
                have[d.name] = first if i == 0 and fits else ()
            out.update({d.name: (first if i == 0 and fits else ()) for i, d in enumerate(after)})
        moved = lowering.placed(inputs[0], tuple(have[n] for n in value.shape.names))
        return lowering.local(self, [moved], types, [tuple(out[n] for n in self.output.names)])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (reshape(dy, inputs[0].shape),)


@lru_cache(maxsize=1 << 12)
def groups(a: Shape, b: Shape) -> tuple[tuple[tuple[Dim, ...], tuple[Dim, ...]], ...]:
    """Splits two shapes of equal size into the shortest runs of dimensions with equal products.

    A dimension of one element forms its own group, so that its neighbours stay split when it is added or
    removed.
    """
    out: list[tuple[tuple[Dim, ...], tuple[Dim, ...]]] = []
    i = j = 0
    while i < len(a) or j < len(b):
        if i < len(a) and a.dims[i].size == 1:
            out.append(((a.dims[i],), ()))
            i += 1
            continue
        if j < len(b) and b.dims[j].size == 1:
            out.append(((), (b.dims[j],)))
            j += 1
            continue
        left, right = [a.dims[i]] if i < len(a) else [], [b.dims[j]] if j < len(b) else []
        i, j = i + len(left), j + len(right)
        while math.prod(d.size for d in left) != math.prod(d.size for d in right):
            if math.prod(d.size for d in left) < math.prod(d.size for d in right):
                left.append(a.dims[i])
                i += 1
            else:
                right.append(b.dims[j])
                j += 1
        out.append((tuple(left), tuple(right)))
    return tuple(out)


@dataclass(frozen=True)
class Transpose(Move):
    """The same dimensions in another order."""

    output: Shape
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=self.output.names)

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        if set(x.shape.dims) != set(self.output.dims):
            raise UserError(f"transpose of {x} to [{self.output}]: both must have the same dimensions")
        return TensorType(self.output, x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        t = at.inputs[0].shape
        return align(k, slices[0], t.names, self.output.names, t.sizes)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (transpose(dy, inputs[0].shape),)


@dataclass(frozen=True)
class Concat(AlongWhole, Move):
    """Joins tensors along one dimension, which may differ in size."""

    why: ClassVar[str] = "pieces of different operands would be on different devices"

    def infer(self, *inputs: TensorType) -> TensorType:
        first = inputs[0]
        axis = first.shape.index(self.dim)
        for x in inputs[1:]:
            if self.dim not in x.shape.names or x.shape.without(self.dim) != first.shape.without(self.dim):
                raise UserError(
                    f"concat over {self.dim!r} of {listing(inputs)}: all other dimensions must be the "
                    "same in the same order; transpose or rename them first"
                )
        total = sum(x.shape.dim(self.dim).size for x in inputs)
        dims = [Dim(d.name, total) if i == axis else d for i, d in enumerate(first.shape)]
        return TensorType(Shape(dims), same_dtype("concat", inputs))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.concat(slices, at.outputs[0].shape.index(self.dim))

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        parts, begin = [], 0
        for i in inputs:
            size = low.values[i].shape.dim(self.dim).size
            parts.append((begin, 0, size))
            begin += size
        return [rearranged(low, self, inputs, types[0], self.dim, parts)]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        grads, begin = [], 0
        for x in inputs:
            size = x.shape.dim(self.dim).size
            grads.append(slice_dim(dy, self.dim, begin, size))
            begin += size
        return grads


@dataclass(frozen=True)
class SliceDim(AlongWhole, Move):
    """`size` elements of one dimension from `begin`; the dimension may take another name."""

    begin: int
    size: int
    why: ClassVar[str] = "only some devices have the requested part"

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        d = x.shape.dim(self.dim)
        if self.begin < 0 or self.size < 1 or self.begin + self.size > d.size:
            raise UserError(
                f"slice of {x}: begin={self.begin}, size={self.size} must select at least one element "
                f"and stay within the {d.size} elements of {self.dim!r}"
            )
        return TensorType(
            Shape(Dim(self.dim, self.size) if e.name == self.dim else e for e in x.shape), x.dtype
        )

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        shape = at.inputs[0].shape
        axis = shape.index(self.dim)
        begin = [self.begin if i == axis else 0 for i in range(len(shape))]
        return k.slice(slices[0], begin, at.outputs[0].shape.sizes)

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        return [rearranged(low, self, inputs, types[0], self.dim, [(0, self.begin, self.size)])]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        total = inputs[0].shape.dim(self.dim).size
        return (pad(dy, self.dim, self.begin, total - self.begin - self.size),)


@dataclass(frozen=True)
class Pad(AlongWhole, Move):
    """Adds `before` and `after` elements of one value along one dimension."""

    before: int
    after: int
    value: float
    why: ClassVar[str] = "padding shifts elements to other devices"

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        if self.before < 0 or self.after < 0:
            raise UserError(
                f"pad of {x}: before={self.before} and after={self.after} must both be at least 0"
            )
        check_number("pad", self.value, x.dtype)
        size = x.shape.dim(self.dim).size + self.before + self.after
        return TensorType(Shape(Dim(self.dim, size) if e.name == self.dim else e for e in x.shape), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        widths = [(self.before, self.after) if n == self.dim else (0, 0) for n in at.inputs[0].shape.names]
        return k.pad(slices[0], widths, self.value)

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        size = low.values[inputs[0]].shape.dim(self.dim).size
        return [rearranged(low, self, inputs, types[0], self.dim, [(self.before, 0, size)], self.value)]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (slice_dim(dy, self.dim, self.before, inputs[0].shape.dim(self.dim).size),)


def rename(x: Tensor, /, **names: str) -> Tensor:
    """x with dimensions renamed: rename(x, length="memory_length").

    Example:
      >>> import mesh_tf_core as mtf
      >>> x = mtf.Graph("g").input("x", [mtf.Dim("length", 8)], "float32")
      >>> print(mtf.rename(x, length="memory_length").shape)
      memory_length:8
    """
    pairs = tuple((old, new) for old, new in names.items() if old != new)
    return x.graph.apply(Rename(pairs), x) if pairs else x


def rename_dimension(x: Tensor, old: Dim | str, new: str) -> Tensor:
    """x with one dimension renamed."""
    return rename(x, **{dim_name(old): new})


def anonymize(x: Tensor, *dims: Dim | str) -> Tensor:
    """x with the named dimensions (all, if none is named) under names that no layout splits, one per
    position.
    """
    chosen = [dim_name(d) for d in dims] or list(x.shape.names)
    return rename(x, **{name: f"_anonymous_{x.shape.index(name)}" for name in chosen})


def reshape(x: Tensor, output: Shape | Sequence[Dim]) -> Tensor:
    """The elements of x in row-major order as `output`; the sizes' product must agree."""
    shape = Shape(output)
    if shape == x.shape:
        return x
    return x.graph.apply(Transpose(shape) if set(shape.dims) == set(x.shape.dims) else Reshape(shape), x)


def transpose(x: Tensor, output: Shape | Sequence[Dim]) -> Tensor:
    """x with its dimensions in the order of `output`."""
    shape = Shape(output)
    return x if shape == x.shape else x.graph.apply(Transpose(shape), x)


def concat(xs: Sequence[Tensor], dim: Dim | str) -> Tensor:
    """Joins tensors along `dim`; the other dimensions must agree. The result has the first one's order."""
    if not xs:
        raise UserError("concat: found no tensors; pass at least one")
    if len(xs) == 1:
        return xs[0]
    names = xs[0].shape.names
    alike = [x if set(x.shape.names) != set(names) else transpose(x, [x.dim(n) for n in names]) for x in xs]
    return xs[0].graph.apply(Concat(dim_name(dim)), *alike)


def slice_dim(x: Tensor, dim: Dim | str, begin: int, size: int) -> Tensor:
    """Elements begin .. begin+size-1 along `dim`."""
    if begin == 0 and size == x.shape.dim(dim_name(dim)).size:
        return x
    return x.graph.apply(SliceDim(dim_name(dim), begin, size), x)


def pad(x: Tensor, dim: Dim | str, before: int, after: int, value: float = 0.0) -> Tensor:
    """x with `before` and `after` elements of `value` added along `dim`."""
    if before == 0 and after == 0:
        return x
    return x.graph.apply(Pad(dim_name(dim), before, after, value), x)
