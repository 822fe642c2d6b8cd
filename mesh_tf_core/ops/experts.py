"""Tokens to the experts that they chose, products there, and results back: nothing is dropped or padded.

A token's rows lie along a `SparseDim` of the experts. Where a layout splits experts and tokens over the same
axes, rows travel by all-to-all: tokens times choices. An engine's arrays have one size whatever is chosen: a
device has a place for each choice of all tokens that may come to it, and zeros in those of other devices'
experts. So engines hold and send more than is counted, as programs of fixed sizes do that drop nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape, SparseDim
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Emitter, Op, Roles, TensorType, Work
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ir.traits import DimensionNames
from mesh_tf_core.ops.common import listing, same_dtype
from mesh_tf_core.ops.grouped import matrix
from mesh_tf_core.ops.index import local_ids, need_ints
from mesh_tf_core.ops.shape import transpose


@dataclass(frozen=True)
class _Exchange(DimensionNames, abstract=True):
    """Rows between their tokens [group, tokens, rest] and the experts [sent, tokens, experts, rest], where
    `sent` is the group under another name.

    Attributes:
      choice: of a token's rows: there is one for each choice. If `alike`, the token's side lacks it.
      rest: names of the dimensions behind.
    """

    experts: SparseDim
    choice: Dim
    group: str
    sent: str
    rest: tuple[str, ...]
    alike: bool
    kind: ClassVar[str] = "gather"
    linear: ClassVar[bool] = True
    regroups: ClassVar[bool] = True

    @property
    def still(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.rest

    def roles(self, *inputs: TensorType) -> Roles:
        made = self.infer(*inputs)
        assert isinstance(made, TensorType)
        return Roles(parallel=tuple(dict.fromkeys((*inputs[0].shape.names, *made.shape.names))))

    def _crossing(self, tokens: Axes, sent: Axes, experts: Axes) -> Axes:
        """The axes over which rows travel: those of the tokens that the experts have instead."""
        found = tokens[len(sent) :]
        return found if found and (*sent, *found) == tokens and experts[-len(found) :] == found else ()

    def _travels(self, low: Emitter, crossing: Axes) -> bool:
        """Whether sending rows is less than gathering tokens, or adding up their results."""
        return bool(crossing) and not (self.alike and low.oracle.ways(crossing) <= self.experts.filled)


@dataclass(frozen=True)
class ToExperts(_Exchange):
    """x at the experts of its tokens."""

    @property
    def renames(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return ((self.group, self.sent),)

    def infer(self, *inputs: TensorType) -> TensorType:
        x = inputs[0].shape
        first = [d for d in x if d.name not in (self.choice.name, *self.rest)]
        first = [Dim(self.sent, d.size) if d.name == self.group else d for d in first]
        dims = [*first, self.experts, *(x.dim(n) for n in self.rest)]
        return TensorType(Shape(dims), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        shape, sizes = at.inputs[0].shape, list(at.outputs[0].shape.sizes)
        place = len(sizes) - len(self.rest) - 1
        order = _order(shape, [d.name for d in shape if d.name not in (self.choice.name, *self.rest)], self)
        x = k.transpose(slices[0], order) if order != list(range(len(order))) else slices[0]
        return k.broadcast_to(
            k.reshape(x, [*sizes[:place], 1 if self.alike else sizes[place], *sizes[place + 1 :]]), sizes
        )

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Rows travel by all-to-all, or tokens are gathered if they go to fewer devices than experts."""
        x = low.without(inputs[0], [self.choice.name])
        v, names = low.values[x], types[0].shape.names
        wanted = low.natural(types[0].shape)
        there = dict(zip(names, wanted, strict=True))
        tokens = v.split_of(self.group)
        crossing = self._crossing(tokens, there[self.sent], there[self.experts.name])
        if self._travels(low, crossing):
            home: Mapping[str, Axes] = {**there, self.sent: tokens, self.experts.name: ()}
        else:
            home = there
        before = {**home, self.group: home[self.sent], self.choice.name: ()}
        x = low.placed(x, tuple(before[n] for n in v.shape.names))
        (rows,) = low.local(self, [x], types, [tuple(home[n] for n in names)])
        return [low.placed(rows, wanted)]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        back = FromExperts(self.experts, self.choice, self.group, self.sent, self.rest, self.alike)
        return (transpose(dy.graph.apply(back, dy), inputs[0].shape),)


@dataclass(frozen=True)
class FromExperts(_Exchange):
    """Rows x at the experts, which are zero in places of other devices' experts (a product leaves them so),
    at their tokens; if `alike`, the sum of each token's."""

    kind: ClassVar[str] = "reduce"

    @property
    def renames(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return ((self.sent, self.group),)

    def infer(self, *inputs: TensorType) -> TensorType:
        x = inputs[0].shape
        first = [d for d in x if d.name not in (self.experts.name, *self.rest)]
        first = [Dim(self.group, d.size) if d.name == self.sent else d for d in first]
        own = [] if self.alike else [self.choice]
        return TensorType(Shape([*first, *own, *(x.dim(n) for n in self.rest)]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        shape = at.inputs[0].shape
        first = [d.name for d in shape if d.name not in (self.experts.name, *self.rest)]
        order = [shape.index(n) for n in (*first, self.experts.name, *self.rest)]
        x = k.transpose(slices[0], order) if order != list(range(len(order))) else slices[0]
        return k.reduce("sum", x, [len(first)]) if self.alike else x

    def flops(self, *local: TensorType) -> float:
        return float(local[0].shape.size)

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Rows travel back, or the sums of a device's own experts are added up over devices."""
        (x,) = inputs
        v, names = low.values[x], types[0].shape.names
        there = dict(zip(names, low.natural(types[0].shape), strict=True))
        here = dict(zip(v.shape.names, v.splits, strict=True))
        own = here[self.experts.name]
        crossing = self._crossing(there[self.group], here[self.sent], own)
        if self._travels(low, crossing):
            own = own[: -len(crossing)]
            here = {**here, self.sent: there[self.group], self.experts.name: own}
            x = low.placed(x, tuple(here[n] for n in v.shape.names))
        splits = {**here, self.group: here[self.sent], self.choice.name: ()}
        (y,) = low.local(self, [x], types, [tuple(splits[n] for n in names)], [own])
        return [low.joined(y, own, "sum") if own else y]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        there = ToExperts(self.experts, self.choice, self.group, self.sent, self.rest, self.alike)
        return (transpose(dy.graph.apply(there, dy), inputs[0].shape),)


def _order(shape: Shape, first: Sequence[str], op: _Exchange) -> list[int]:
    """The positions of the tokens' dimensions, of the choice, and of the rest."""
    own = [] if op.alike else [op.choice.name]
    return [shape.index(n) for n in (*first, *own, *op.rest)]


@dataclass(frozen=True)
class ExpertProduct(Op):
    """Rows x [tokens, experts, summed] times the matrix of their expert, of w [experts, summed, made]:
    [tokens, experts, made]; zero in places of other devices' experts.

    `ids` [tokens, experts] names each row's expert; a row of another number gives zeros.
    """

    experts: Dim
    kind: ClassVar[str] = "matmul"

    def _parts(self, inputs: Sequence[TensorType]) -> tuple[tuple[str, ...], ...]:
        """(rows, summed, made)."""
        rows = _rows("expert_product", inputs, self.experts)
        x, w = (t.shape for t in inputs[:2])
        summed = tuple(n for n in x.names if n not in rows)
        return rows, summed, tuple(n for n in w.names if n not in (*summed, self.experts.name))

    def roles(self, *inputs: TensorType) -> Roles:
        rows, summed, made = self._parts(inputs)
        return Roles(parallel=(*rows, *made), reduced=summed)

    def infer(self, *inputs: TensorType) -> TensorType:
        rows, summed, made = self._parts(inputs)
        x, w = (t.shape for t in inputs[:2])
        if self.experts not in w.dims or any(x.dim(n) not in w.dims for n in summed):
            raise UserError(
                f"expert_product of {listing(inputs)}: the matrices must have the dimensions {self.experts}"
                f"{''.join(f' and {x.dim(n)}' for n in summed)}"
            )
        if clash := {*rows} & {*made}:
            raise UserError(
                f"expert_product of {listing(inputs)}: rows and matrices both have dimension {min(clash)!r}; "
                "rename it in one of them with mtf.rename"
            )
        dims = [*(x.dim(n) for n in rows), *(w.dim(n) for n in made)]
        return TensorType(Shape(dims), same_dtype("expert_product", inputs[:2]))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        rows, summed, made = self._parts(at.inputs)
        n = at.inputs[1].shape.dim(self.experts.name).size
        w = matrix(k, slices[1], at.inputs[1], (self.experts.name,), summed, made)
        order, back, own = _sorted(k, at, slices[2], rows, self.experts.name, n)
        x = k.take(matrix(k, slices[0], at.inputs[0], rows, summed), order)
        return k.reshape(k.take(k.grouped(x, w, own, n), back), at.outputs[0].shape.sizes)

    def flops(self, *local: TensorType) -> float:
        _, made, summed, rows = self._sizes(local)
        return 2.0 * rows * summed * made

    def work(self, *local: TensorType) -> Work:
        groups, made, summed, rows = self._sizes(local)
        return Work((groups, max(1, rows // groups), made, summed))

    def _sizes(self, local: Sequence[TensorType]) -> tuple[int, int, int, int]:
        """(experts, made, summed, rows) of a device."""
        rows, summed, made = self._parts(local)
        x, w = (t.shape for t in local[:2])
        return w.dim(self.experts.name).size, _size(w, made), _size(x, summed), _size(x, rows)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, w, ids = inputs
        dx = dy.graph.apply(ExpertProduct(self.experts), dy, w, ids)
        dw = dy.graph.apply(ExpertOuter(self.experts), x, dy, ids)
        return transpose(dx, x.shape), transpose(dw, w.shape), None


@dataclass(frozen=True)
class ExpertOuter(Op):
    """The products of x [tokens, experts, left] and y [tokens, experts, right], summed over the tokens of
    each expert: [experts, left, right]; `ids` as of `ExpertProduct`."""

    experts: Dim
    kind: ClassVar[str] = "matmul"

    def _parts(self, inputs: Sequence[TensorType]) -> tuple[tuple[str, ...], ...]:
        """(rows, left, right)."""
        rows = _rows("expert_outer", inputs, self.experts)
        left, right = (tuple(n for n in t.shape.names if n not in rows) for t in inputs[:2])
        return rows, left, right

    def roles(self, *inputs: TensorType) -> Roles:
        rows, left, right = self._parts(inputs)
        tokens = tuple(n for n in rows if n != self.experts.name)
        return Roles(parallel=(self.experts.name, *left, *right), reduced=tokens)

    def infer(self, *inputs: TensorType) -> TensorType:
        _, left, right = self._parts(inputs)
        x, y = (t.shape for t in inputs[:2])
        dims = [self.experts, *(x.dim(n) for n in left), *(y.dim(n) for n in right)]
        return TensorType(Shape(dims), same_dtype("expert_outer", inputs[:2]))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        rows, left, right = self._parts(at.inputs)
        n = at.outputs[0].shape.sizes[0]
        order, _, own = _sorted(k, at, slices[2], rows, self.experts.name, n)
        x = k.take(matrix(k, slices[0], at.inputs[0], rows, left), order)
        y = k.take(matrix(k, slices[1], at.inputs[1], rows, right), order)
        return k.reshape(k.grouped_outer(x, y, own, n, n), at.outputs[0].shape.sizes)

    def flops(self, *local: TensorType) -> float:
        rows, left, right = self._sizes(local)
        return 2.0 * rows * left * right

    def work(self, *local: TensorType) -> Work:
        rows, left, right = self._sizes(local)
        thin = local[0].shape.sparse
        groups = self.experts.size if thin is None else thin.size
        return Work((groups, left, right, max(1, rows // groups)))

    def _sizes(self, local: Sequence[TensorType]) -> tuple[int, int, int]:
        """(rows, left, right) of a device."""
        rows, left, right = self._parts(local)
        return _size(local[0].shape, rows), _size(local[0].shape, left), _size(local[1].shape, right)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, y, ids = inputs
        dx = dy.graph.apply(ExpertProduct(self.experts), y, dy, ids)
        other = dy.graph.apply(ExpertProduct(self.experts), x, dy, ids)
        return transpose(dx, x.shape), transpose(other, y.shape), None


def _rows(op: str, inputs: Sequence[TensorType], experts: Dim) -> tuple[str, ...]:
    """The dimensions of the rows, which are those of the ids."""
    need_ints(op, inputs[-1])
    for t in (inputs[0], inputs[-1]):
        if experts.name not in t.shape.names:
            raise UserError(
                f"{op} of {listing(inputs)}: rows and ids must have the dimension {experts.name!r}; send "
                "them to the experts first with to_experts"
            )
    return inputs[-1].shape.names


def _size(shape: Shape, names: Sequence[str]) -> int:
    return Shape([shape.dim(n) for n in names]).size


def _sorted(
    k: Kernel, at: At, ids: Any, rows: Sequence[str], experts: str, count: int
) -> tuple[Any, Any, Any]:
    """The rows in the order of their experts, their places in it, and the experts in order, `count` of rows
    that are elsewhere."""
    relative, inside = local_ids(k, at, matrix(k, ids, at.inputs[-1], rows), experts, count)
    far = k.scalar(count, "int32")
    own = k.where(inside, relative, far)
    n = at.inputs[-1].shape.size
    falling, order = k.top_k(k.binary("sub", far, own), n)
    return order, k.segment_sum(k.iota(n, "int32"), order, n), k.binary("sub", far, falling)


def to_experts(x: Tensor, experts: SparseDim, choice: Dim, group: str, rest: Sequence[str] = ()) -> Tensor:
    """x [group, tokens, rest], or with a choice [group, tokens, choice, rest], at the experts:
    [expert_<group>, tokens, experts, rest]."""
    alike = choice.name not in x.shape.names
    return x.graph.apply(ToExperts(experts, choice, group, f"expert_{group}", tuple(rest), alike), x)


def from_experts(x: Tensor, choice: Dim, group: str, rest: Sequence[str] = ()) -> Tensor:
    """The sum of each token's rows [expert_<group>, tokens, experts, rest]: [group, tokens, rest].

    Places of other devices' experts must be zero, as `expert_product` leaves them.
    """
    experts = x.shape.sparse
    assert experts is not None, "rows that to_experts sent"
    return x.graph.apply(FromExperts(experts, choice, group, f"expert_{group}", tuple(rest), True), x)


def expert_product(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """Multiplies each row of x [tokens, experts, summed] by the matrix of its expert, of w [experts, summed,
    made]: [tokens, experts, made]; `ids` [tokens, experts] as `to_experts` sent them."""
    thin = ids.shape.sparse
    assert thin is not None, "ids that to_experts sent"
    return x.graph.apply(ExpertProduct(w.shape.dim(thin.name)), x, w, ids)
