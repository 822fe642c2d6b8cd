"""Indexing: one-hot, ranges, embedding look-up and its gradient, picking one element along a dimension, and
reading or writing one at a position that is known only when the program runs.

Where that dimension is split, the device that holds the position does the work: writing sends nothing,
reading joins one element. So a cache of keys and values is filled in place under any layout (see `decoding`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import check_dtype
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.kinds import Move, NoGradient, Reduction, SourceOp, dim_name, dtype_name, listing
from mesh_tf_core.ops.shape import transpose


def need_ints(op: str, ids: TensorType) -> None:
    """UserError unless `ids` can be indices."""
    if ids.dtype not in ("int32", "int64"):
        raise UserError(f"{op}: the indices must be int32 or int64, found {ids}; cast them first")


def _no_shared(op: str, ids: Shape, table: Shape, inputs: Sequence[TensorType]) -> None:
    """The table's dimensions and those of the ids mean different things, so they need different names."""
    for name in table.names:
        if name in ids.names:
            raise UserError(
                f"{op} of {listing(inputs)}: both the table and the ids have dimension {name!r}; "
                "rename it in one of them with mtf.rename"
            )


def local_ids(k: Kernel, at: At, ids: Any, dim: str, size: int) -> tuple[Any, Any]:
    """Ids relative to this device's piece, clipped into it, and which of them fall inside."""
    dtype = dtype_name(ids)
    relative = k.binary("sub", ids, k.scalar(at.offset(dim), dtype)) if dim in at.split else ids
    zero, last = k.scalar(0, dtype), k.scalar(size - 1, dtype)
    inside = k.binary("and", k.binary("ge", relative, zero), k.binary("le", relative, last))
    return k.cast(k.binary("min", k.binary("max", relative, zero), last), "int32"), inside


def one_hot_like(k: Kernel, at: At, ids: Any, dim: str) -> Any:
    """Bool, true where the index along `dim` of the first output equals `ids` (already aligned to that
    output)."""
    shape = at.outputs[0].shape
    axis = shape.index(dim)
    dtype = dtype_name(ids)
    positions = k.iota(shape.sizes[axis], dtype)
    if dim in at.split:
        positions = k.binary("add", positions, k.scalar(at.offset(dim), dtype))
    sizes = [shape.sizes[axis] if i == axis else 1 for i in range(axis, len(shape))]
    return k.binary("eq", ids, k.reshape(positions, sizes))


@dataclass(frozen=True)
class Range(SourceOp):
    """0, 1, ... along one dimension."""

    dim: Dim
    dtype: str

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape([self.dim]), check_dtype(self.dtype))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        positions = k.iota(at.outputs[0].shape.sizes[0], self.dtype)
        if self.dim.name not in at.split:
            return positions
        return k.binary("add", positions, k.scalar(at.offset(self.dim.name), self.dtype))


@dataclass(frozen=True)
class OneHot(NoGradient):
    """1 where the index along `dim` equals the id, else 0."""

    dim: Dim
    dtype: str

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=(*inputs[0].shape.names, self.dim.name))

    def infer(self, *inputs: TensorType) -> TensorType:
        need_ints("one_hot", inputs[0])
        return TensorType(Shape([*inputs[0].shape, self.dim]), check_dtype(self.dtype))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        ids = k.reshape(slices[0], (*at.inputs[0].shape.sizes, 1))
        return k.cast(one_hot_like(k, at, ids, self.dim.name), self.dtype)

    def flops(self, *local: TensorType) -> float:
        return 0.0


@dataclass(frozen=True)
class Gather(Move):
    """Rows of a table [dim, rest] by id: an embedding. Ids outside the table give zeros."""

    dim: str
    kind: ClassVar[str] = "gather"

    def roles(self, *inputs: TensorType) -> Roles:
        table, ids = inputs
        return Roles(parallel=(*ids.shape.names, *table.shape.without(self.dim).names), reduced=(self.dim,))

    def infer(self, *inputs: TensorType) -> TensorType:
        table, ids = inputs
        need_ints("gather", ids)
        if table.shape.index(self.dim):
            raise UserError(
                f"gather of {listing(inputs)}: {self.dim!r} must be the first dimension of the table; "
                "transpose the table first"
            )
        _no_shared("gather", ids.shape, table.shape, inputs)
        return TensorType(Shape([*ids.shape, *table.shape.without(self.dim)]), table.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        table, ids = slices
        types = at.inputs
        relative, inside = local_ids(k, at, ids, self.dim, types[0].shape.sizes[0])
        rows = k.take(table, relative)
        mask = k.reshape(inside, (*types[1].shape.sizes, *(1 for _ in types[0].shape.sizes[1:])))
        return k.where(mask, rows, k.scalar(0, types[0].dtype))

    def labels(self, *inputs: TensorType) -> tuple[int, Dim, bool]:
        return 1, inputs[0].shape.dim(self.dim), True

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        table, ids = inputs
        return (dy.graph.apply(ScatterAdd(table.shape.dim(self.dim)), dy, ids), None)


@dataclass(frozen=True)
class ScatterAdd(Reduction):
    """Sums rows x [ids' dims, rest] into a table [dim, rest] by id. Ids outside the table are dropped."""

    dim: Dim
    kind: ClassVar[str] = "gather"

    def roles(self, *inputs: TensorType) -> Roles:
        x, ids = inputs
        kept = tuple(n for n in x.shape.names if n not in ids.shape.names)
        return Roles(parallel=(self.dim.name, *kept), reduced=ids.shape.names)

    def infer(self, *inputs: TensorType) -> TensorType:
        x, ids = inputs
        need_ints("scatter_add", ids)
        if x.shape.dims[: len(ids.shape)] != ids.shape.dims:
            raise UserError(
                f"scatter_add of {listing(inputs)}: the first dimensions of the rows must be the ids' "
                "dimensions; transpose the rows first"
            )
        _no_shared("scatter_add", ids.shape, Shape([self.dim]), inputs)
        return TensorType(Shape([self.dim, *x.shape.dims[len(ids.shape) :]]), x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, ids = slices
        n = at.outputs[0].shape.sizes[0]
        relative, inside = local_ids(k, at, ids, self.dim.name, n)
        return k.segment_sum(x, k.where(inside, relative, k.scalar(-1, "int32")), n)

    def distributes(self, constant: Sequence[bool]) -> bool:
        return constant[1] and not constant[0]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(Gather(self.dim.name), dy, inputs[1]), None)


_MOST_POSITIONS = 2**31
"""Flat positions beyond int32 are not computed: larger tensors are picked from by comparison."""


@dataclass(frozen=True)
class Pick(Move):
    """The element of x [..., dim] at an index for every other position: [...]."""

    dim: str
    kind: ClassVar[str] = "gather"

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=inputs[0].shape.without(self.dim).names, reduced=(self.dim,))

    def infer(self, *inputs: TensorType) -> TensorType:
        x, ids = inputs
        need_ints("pick", ids)
        if set(ids.shape.dims) != set(x.shape.without(self.dim).dims):
            raise UserError(
                f"pick of {listing(inputs)}: the ids must have the dimensions of x except {self.dim!r}"
            )
        return TensorType(ids.shape, x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, ids = slices
        shape, wanted = at.inputs[0].shape, at.inputs[1].shape
        n = shape.dim(self.dim).size
        order = [shape.index(name) for name in (*wanted.names, self.dim)]
        x = k.transpose(x, order) if order != list(range(len(order))) else x
        rows = math.prod(wanted.sizes)
        relative, inside = local_ids(k, at, k.reshape(ids, (rows,)), self.dim, n)
        if (k.compares and at.inputs[0].dtype != "bool") or rows * n >= _MOST_POSITIONS:
            hot = k.binary("eq", k.reshape(relative, (rows, 1)), k.reshape(k.iota(n, "int32"), (1, n)))
            zero = k.scalar(0, at.inputs[0].dtype)
            found = k.reduce("sum", k.where(hot, k.reshape(x, (rows, n)), zero), [1])
        else:
            base = k.binary("mul", k.iota(rows, "int32"), k.scalar(n, "int32"))
            found = k.take(k.reshape(x, (rows * n,)), k.binary("add", base, relative))
        return k.reshape(k.where(inside, found, k.scalar(0, at.inputs[0].dtype)), wanted.sizes)

    def labels(self, *inputs: TensorType) -> tuple[int, Dim, bool]:
        return 1, inputs[0].shape.dim(self.dim), False

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, ids = inputs
        hot = dy.graph.apply(OneHot(x.shape.dim(self.dim), dy.dtype), ids)
        return (einsum([dy, hot], x.shape), None)


def mtf_range(graph: object, dim: Dim, dtype: str = "int32") -> Tensor:
    """0, 1, ... along `dim`."""
    return graph.apply(Range(dim, dtype))  # type: ignore[attr-defined]


def one_hot(
    ids: Tensor, dim: Dim, dtype: str = "float32", on_value: float = 1.0, off_value: float = 0.0
) -> Tensor:
    """`on_value` along `dim` at each id, else `off_value`: [dimensions of ids, dim]."""
    marks: Tensor = ids.graph.apply(OneHot(dim, dtype), ids)
    return marks if (on_value, off_value) == (1, 0) else marks * (on_value - off_value) + off_value


def gather(table: Tensor, ids: Tensor, dim: Dim | str) -> Tensor:
    """Takes slices of `table` along `dim` by id: [dimensions of ids, other dimensions of table].

    Ids outside the table give zeros.
    """
    name = dim.name if isinstance(dim, Dim) else dim
    if table.shape.index(name):
        table = transpose(table, [table.shape.dim(name), *table.shape.without(name)])
    return table.graph.apply(Gather(name), table, ids)


def pick(x: Tensor, ids: Tensor, dim: Dim | str) -> Tensor:
    """x at index `ids` along `dim`; ids has the other dimensions of x."""
    return x.graph.apply(Pick(dim.name if isinstance(dim, Dim) else dim), x, ids)


def scatter_add(rows: Tensor, ids: Tensor, dim: Dim) -> Tensor:
    """Sums the rows with equal ids into a table [dim, rest]."""
    return rows.graph.apply(ScatterAdd(dim), rows, ids)


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
