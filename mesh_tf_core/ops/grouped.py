"""Rows times the matrix of the group that they are in: experts, each with as many rows as chose it.

The number of rows of a group is known only at run time. Work is counted as if all groups had as many: a
device with some of the groups has their part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType, Work
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.index import mtf_range, need_ints
from mesh_tf_core.ops.kinds import dtype_name, listing, same_dtype
from mesh_tf_core.ops.shape import transpose


def _own_groups(k: Kernel, at: At, ids: Any, group: Dim, count: int) -> Any:
    """Ids relative to this device's groups: -1 before the first of them, `count` behind the last."""
    if group.name not in at.split:
        return ids
    dtype = dtype_name(ids)
    own = k.binary("sub", ids, k.scalar(at.offset(group.name), dtype))
    return k.binary("min", k.binary("max", own, k.scalar(-1, dtype)), k.scalar(count, dtype))


def matrix(k: Kernel, x: Any, type: TensorType, *parts: Sequence[str]) -> Any:
    """x with one axis for each part of its dimensions."""
    order = [type.shape.index(name) for part in parts for name in part]
    x = k.transpose(x, order) if order != list(range(len(order))) else x
    return k.reshape(x, [math.prod(type.shape.dim(n).size for n in part) for part in parts])


def _rows(op: str, inputs: Sequence[TensorType]) -> tuple[str, ...]:
    """The dimensions of the rows: those of the ids, which the other operand of every row has."""
    need_ints(op, inputs[2])
    for d in inputs[2].shape:
        if d not in inputs[0].shape.dims:
            raise UserError(f"{op} of {listing(inputs)}: the first operand must have the ids' dimension {d}")
    return inputs[2].shape.names


def size_of(shape: Shape, names: Sequence[str]) -> int:
    """Elements along some dimensions of a shape."""
    return Shape([shape.dim(n) for n in names]).size


@dataclass(frozen=True)
class GroupedProduct(Op):
    """Rows x [rows, summed] times w [group, summed, made] of their group: [rows, made].

    `ids` [rows] names each row's group, from 0; it never falls, so that a group's rows lie together. A row
    behind all groups gives zeros.
    """

    group: Dim
    kind: ClassVar[str] = "matmul"
    said: ClassVar[str] = "grouped_product"
    inside: ClassVar[bool] = False
    """Rows lie along the groups' dimension: a device has the rows of its own groups alone."""

    def _rows(self, inputs: Sequence[TensorType]) -> tuple[str, ...]:
        return _rows(self.said, inputs)

    def _parts(self, inputs: Sequence[TensorType]) -> tuple[tuple[str, ...], ...]:
        """(rows, summed, made)."""
        rows, (x, w) = self._rows(inputs), (t.shape for t in inputs[:2])
        summed = tuple(n for n in x.names if n not in rows)
        return rows, summed, tuple(n for n in w.names if n not in (*summed, self.group.name))

    def roles(self, *inputs: TensorType) -> Roles:
        rows, summed, made = self._parts(inputs)
        reduced = tuple(n for n in (*summed, self.group.name) if n not in rows)
        return Roles(parallel=(*rows, *made), reduced=reduced)

    def infer(self, *inputs: TensorType) -> TensorType:
        rows, summed, made = self._parts(inputs)
        x, w = (t.shape for t in inputs[:2])
        for name in (*summed, self.group.name):
            if name not in w.names or (name in summed and w.dim(name) != x.dim(name)):
                raise UserError(
                    f"{self.said} of {listing(inputs)}: the matrices must have the dimension {name!r}"
                )
        if clash := {*rows} & {*made} or (set() if self.inside else {self.group.name} & {*x.names}):
            raise UserError(
                f"{self.said} of {listing(inputs)}: rows and matrices both have dimension "
                f"{min(clash)!r}; rename it in one of them with mtf.rename"
            )
        dims = [*(x.dim(n) for n in rows), *(w.dim(n) for n in made)]
        return TensorType(Shape(dims), same_dtype(self.said, inputs[:2]))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, w, ids = slices
        rows, summed, made = self._parts(at.inputs)
        count = at.inputs[1].shape.dim(self.group.name).size
        x = matrix(k, x, at.inputs[0], rows, summed)
        w = matrix(k, w, at.inputs[1], (self.group.name,), summed, made)
        own = _own_groups(k, at, matrix(k, ids, at.inputs[2], rows), self.group, count)
        return k.reshape(k.grouped(x, w, own, self.group.size), at.outputs[0].shape.sizes)

    def flops(self, *local: TensorType) -> float:
        rows, summed, made, groups = self._sizes(local)
        return 2.0 * rows * summed * made * groups / (groups if self.inside else self.group.size)

    def work(self, *local: TensorType) -> Work:
        rows, summed, made, groups = self._sizes(local)
        every = groups if self.inside else self.group.size
        return Work((groups, max(1, rows // every), made, summed), grouped=True)

    def _sizes(self, local: Sequence[TensorType]) -> tuple[int, int, int, int]:
        """(rows, summed, made, groups) of a device."""
        rows, summed, made = self._parts(local)
        x, w = (t.shape for t in local[:2])
        return size_of(x, rows), size_of(x, summed), size_of(w, made), w.dim(self.group.name).size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, w, ids = inputs
        dx = dy.graph.apply(type(self)(self.group), dy, w, ids)
        return transpose(dx, x.shape), transpose(self._outer(x, dy, ids), w.shape), None

    def _outer(self, x: Tensor, dy: Tensor, ids: Tensor) -> Tensor:
        """The gradient of the matrices."""
        return dy.graph.apply(GroupedOuter(self.group), x, dy, ids, mtf_range(dy.graph, self.group))


@dataclass(frozen=True)
class GroupedOuter(Op):
    """The products of x [rows, left] and y [rows, right], summed over the rows of each group: [group, left,
    right]; `ids` as of `GroupedProduct`, and the number of each group [group]."""

    group: Dim
    kind: ClassVar[str] = "matmul"
    product: ClassVar[type[GroupedProduct]] = GroupedProduct
    """Whose gradient it is, and its own."""

    def _parts(self, inputs: Sequence[TensorType]) -> tuple[tuple[str, ...], ...]:
        """(rows, left, right)."""
        rows = self.product(self.group)._rows(inputs)
        left, right = (tuple(n for n in t.shape.names if n not in rows) for t in inputs[:2])
        return rows, left, right

    def roles(self, *inputs: TensorType) -> Roles:
        rows, left, right = self._parts(inputs)
        reduced = tuple(n for n in rows if n != self.group.name)
        return Roles(parallel=(self.group.name, *left, *right), reduced=reduced)

    def infer(self, *inputs: TensorType) -> TensorType:
        rows, left, right = self._parts(inputs)
        x, y = (t.shape for t in inputs[:2])
        if any(n not in y.names or x.dim(n) != y.dim(n) for n in rows):
            raise UserError(
                f"grouped_outer of {listing(inputs)}: both operands must have the ids' dimensions"
            )
        if inputs[3:] and inputs[3].shape != Shape([self.group]):
            raise UserError(
                f"grouped_outer of {listing(inputs)}: the last operand must have the dimensions "
                f"[{self.group}]"
            )
        own = set() if self.product.inside else {self.group.name}
        if clash := {*left} & {*right} or own & {*x.names, *y.names}:
            raise UserError(
                f"grouped_outer of {listing(inputs)}: both operands have dimension {min(clash)!r}; rename it "
                "in one of them with mtf.rename"
            )
        dims = [self.group, *(x.dim(n) for n in left), *(y.dim(n) for n in right)]
        return TensorType(Shape(dims), same_dtype("grouped_outer", inputs[:2]))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, y, ids, _ = slices
        rows, left, right = self._parts(at.inputs)
        count = at.outputs[0].shape.sizes[0]
        x, y = matrix(k, x, at.inputs[0], rows, left), matrix(k, y, at.inputs[1], rows, right)
        own = _own_groups(k, at, matrix(k, ids, at.inputs[2], rows), self.group, count)
        return k.reshape(k.grouped_outer(x, y, own, count, self.group.size), at.outputs[0].shape.sizes)

    def flops(self, *local: TensorType) -> float:
        rows, left, right, groups = self._sizes(local)
        return 2.0 * rows * left * right * groups / (groups if self.product.inside else self.group.size)

    def work(self, *local: TensorType) -> Work:
        rows, left, right, groups = self._sizes(local)
        every = groups if self.product.inside else self.group.size
        return Work((groups, left, right, max(1, rows // every)), grouped=True)

    def _sizes(self, local: Sequence[TensorType]) -> tuple[int, int, int, int]:
        """(rows, left, right, groups) of a device."""
        rows, left, right = self._parts(local)
        x, y = (t.shape for t in local[:2])
        return size_of(x, rows), size_of(x, left), size_of(y, right), self._groups(local)

    def _groups(self, local: Sequence[TensorType]) -> int:
        return local[3].shape.sizes[0]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, y, ids, *rest = inputs
        dx = dy.graph.apply(self.product(self.group), y, dy, ids)
        other = dy.graph.apply(self.product(self.group), x, dy, ids)
        return transpose(dx, x.shape), transpose(other, y.shape), None, *(None for _ in rest)


def grouped_product(x: Tensor, w: Tensor, ids: Tensor, group: Dim | str) -> Tensor:
    """Multiplies each row of x [rows, summed] by the matrix of its group, of w [group, summed, made]:
    [rows, made].

    Args:
      ids: groups of the rows in rising order, with the dimensions of the rows. Rows behind all groups give
        zeros.
    """
    return x.graph.apply(
        GroupedProduct(w.shape.dim(group.name if isinstance(group, Dim) else group)), x, w, ids
    )
