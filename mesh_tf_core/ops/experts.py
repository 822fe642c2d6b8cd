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
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim, Shape, SparseDim
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.grouped import GroupedOuter, GroupedProduct, matrix
from mesh_tf_core.ops.index import local_ids, need_ints
from mesh_tf_core.ops.kinds import Reduction, listing
from mesh_tf_core.ops.shape import transpose


@dataclass(frozen=True)
class _Exchange(Op, abstract=True):
    """Rows between their tokens [tokens, rest] and the experts [tokens, experts, rest].

    Attributes:
      choice: of a token's rows: there is one for each choice. If `alike`, the token's side lacks it.
      tokens: names of the tokens' dimensions, and their names at the experts.
      rest: names of the dimensions behind.
    """

    experts: SparseDim
    choice: Dim
    tokens: tuple[tuple[str, str], ...]
    rest: tuple[str, ...]
    alike: bool
    regroups: ClassVar[bool] = True
    exchanges: ClassVar[bool] = True

    @property
    def still(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.rest

    def roles(self, *inputs: TensorType) -> Roles:
        made = self.infer(*inputs)
        assert isinstance(made, TensorType)
        return Roles(parallel=tuple(dict.fromkeys((*inputs[0].shape.names, *made.shape.names))))

    @property
    def there(self) -> tuple[str, ...]:
        """The dimensions at the experts, in order."""
        return (*(new for _, new in self.tokens), self.experts.name, *self.rest)

    @property
    def here(self) -> tuple[str, ...]:
        """The dimensions at the tokens, in order."""
        return (*(old for old, _ in self.tokens), *([] if self.alike else [self.choice.name]), *self.rest)

    def _sent(self, low: Emitter, tokens: Mapping[str, Axes], experts: Mapping[str, Axes]) -> dict[str, Axes]:
        """The splits of rows that lie as their tokens do, before or after they travel; those at the experts
        if it is less to gather tokens, or to add up their results.

        Args:
          tokens, experts: the splits of the two sides.
        """
        own, moved = experts[self.experts.name], dict[str, Axes]()
        for old, new in self.tokens:
            n, axes = len(experts[new]), tokens[old]
            if axes[:n] == experts[new] and {*axes[n:]} <= {*own}:
                moved[new] = axes
        crossing = {a for new, axes in moved.items() for a in axes[len(experts[new]) :]}
        left = own[: len(own) - len(crossing)]
        few = self.alike and low.oracle.ways(tuple(crossing)) <= self.experts.filled
        if not crossing or few or {*own[len(left) :]} != crossing:
            return {**experts}
        return {**experts, **moved, self.experts.name: left}


def _splits(low: Emitter, shape: Shape, id: int | None = None) -> dict[str, Axes]:
    """The splits of a value by name, or those that the layout gives its shape."""
    found = low.natural(shape) if id is None else low.values[id].splits
    return dict(zip(shape.names, found, strict=True))


@dataclass(frozen=True)
class ToExperts(_Exchange):
    """x at the experts of its tokens."""

    kind: ClassVar[str] = "gather"

    @property
    def renames(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return self.tokens

    def infer(self, *inputs: TensorType) -> TensorType:
        x = inputs[0].shape
        dims = [Dim(new, x.dim(old).size) for old, new in self.tokens]
        return TensorType(Shape([*dims, self.experts, *(x.dim(n) for n in self.rest)]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, sizes, place = _ordered(k, slices[0], at, self.here), at.outputs[0].shape.sizes, len(self.tokens)
        one = k.reshape(x, [*sizes[:place], 1, *sizes[place + 1 :]]) if self.alike else x
        return k.broadcast_to(one, sizes)

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Rows travel by all-to-all, or tokens are gathered if they go to fewer devices than experts."""
        x, names = low.without(inputs[0], [self.choice.name]), types[0].shape.names
        shape, there = low.values[x].shape, _splits(low, types[0].shape)
        home = self._sent(low, _splits(low, shape, x), there)
        before = home | {old: home[new] for old, new in self.tokens} | {self.choice.name: ()}
        x = low.placed(x, tuple(before[n] for n in shape.names))
        (rows,) = low.local(self, [x], types, [tuple(home[n] for n in names)])
        return [low.placed(rows, tuple(there[n] for n in names))]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        back = FromExperts(self.experts, self.choice, self.tokens, self.rest, self.alike)
        return (transpose(dy.graph.apply(back, dy), inputs[0].shape),)


@dataclass(frozen=True)
class FromExperts(_Exchange, Reduction):
    """Rows x at the experts, which are zero in places of other devices' experts (a product leaves them so),
    at their tokens; if `alike`, the sum of each token's."""

    linear: ClassVar[bool] = True

    @property
    def renames(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        return tuple((new, old) for old, new in self.tokens)

    def infer(self, *inputs: TensorType) -> TensorType:
        x = inputs[0].shape
        dims = [Dim(old, x.dim(new).size) for old, new in self.tokens]
        own = [] if self.alike else [self.choice]
        return TensorType(Shape([*dims, *own, *(x.dim(n) for n in self.rest)]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x = _ordered(k, slices[0], at, self.there)
        return k.reduce("sum", x, [len(self.tokens)]) if self.alike else x

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """Rows travel back, or the sums of a device's own experts are added up over devices."""
        (x,), shape = inputs, low.values[inputs[0]].shape
        splits = self._sent(low, _splits(low, types[0].shape), _splits(low, shape, x))
        x = low.placed(x, tuple(splits[n] for n in shape.names))
        own = splits[self.experts.name]
        splits |= {old: splits[new] for old, new in self.tokens} | {self.choice.name: ()}
        (y,) = low.local(self, [x], types, [tuple(splits[n] for n in types[0].shape.names)], [own])
        return [low.joined(y, own, "sum") if own else y]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        there = ToExperts(self.experts, self.choice, self.tokens, self.rest, self.alike)
        return (transpose(dy.graph.apply(there, dy), inputs[0].shape),)


def _ordered(k: Kernel, x: Any, at: At, names: Sequence[str]) -> Any:
    """The first operand with its dimensions in another order."""
    order = [at.inputs[0].shape.index(n) for n in names]
    return k.transpose(x, order) if order != list(range(len(order))) else x


@dataclass(frozen=True)
class ExpertProduct(GroupedProduct):
    """Rows x [tokens, experts, summed] times the matrix of their expert, of w [experts, summed, made]:
    [tokens, experts, made]; zero in places of other devices' experts.

    `ids` [tokens, experts] names each row's expert, in any order; a row of another number gives zeros.
    """

    said: ClassVar[str] = "expert_product"
    inside: ClassVar[bool] = True

    def _rows(self, inputs: Sequence[TensorType]) -> tuple[str, ...]:
        need_ints(self.said, inputs[2])
        for t in (inputs[0], inputs[2]):
            if self.group.name not in t.shape.names:
                raise UserError(
                    f"{self.said} of {listing(inputs)}: rows and ids must have the dimension "
                    f"{self.group.name!r}; send them to the experts first with to_experts"
                )
        return inputs[2].shape.names

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        rows, summed, made = self._parts(at.inputs)
        n = at.inputs[1].shape.dim(self.group.name).size
        w = matrix(k, slices[1], at.inputs[1], (self.group.name,), summed, made)
        order, back, own = _sorted(k, at, slices[2], rows, self.group.name, n)
        x = k.take(matrix(k, slices[0], at.inputs[0], rows, summed), order)
        return k.reshape(k.take(k.grouped(x, w, own, n), back), at.outputs[0].shape.sizes)

    def _outer(self, x: Tensor, dy: Tensor, ids: Tensor) -> Tensor:
        return dy.graph.apply(ExpertOuter(self.group), x, dy, ids)


@dataclass(frozen=True)
class ExpertOuter(GroupedOuter):
    """The products of x [tokens, experts, left] and y [tokens, experts, right], summed over the tokens of
    each expert: [experts, left, right]; `ids` as of `ExpertProduct`."""

    product: ClassVar[type[GroupedProduct]] = ExpertProduct

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        rows, left, right = self._parts(at.inputs)
        n = at.outputs[0].shape.sizes[0]
        order, _, own = _sorted(k, at, slices[2], rows, self.group.name, n)
        x = k.take(matrix(k, slices[0], at.inputs[0], rows, left), order)
        y = k.take(matrix(k, slices[1], at.inputs[1], rows, right), order)
        return k.reshape(k.grouped_outer(x, y, own, n, n), at.outputs[0].shape.sizes)

    def _groups(self, local: Sequence[TensorType]) -> int:
        thin = local[0].shape.sparse
        return self.group.size if thin is None else thin.size


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


def to_experts(
    x: Tensor, experts: SparseDim, choice: Dim, tokens: Sequence[str], rest: Sequence[str] = ()
) -> Tensor:
    """x [tokens, rest], or with a choice [tokens, choice, rest], at the experts: [tokens, experts, rest].

    Each of `tokens` is called `expert_<name>` there.
    """
    names = tuple((n, f"expert_{n}") for n in tokens)
    return x.graph.apply(ToExperts(experts, choice, names, tuple(rest), choice.name not in x.shape.names), x)


def from_experts(x: Tensor, choice: Dim, tokens: Sequence[str], rest: Sequence[str] = ()) -> Tensor:
    """The sum of each token's rows, as `to_experts` made them: [tokens, rest].

    Places of other devices' experts must be zero, as `expert_product` leaves them.
    """
    experts, names = x.shape.sparse, tuple((n, f"expert_{n}") for n in tokens)
    assert experts is not None, "rows that to_experts sent"
    return x.graph.apply(FromExperts(experts, choice, names, tuple(rest), True), x)


def expert_product(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """Multiplies each row of x [tokens, experts, summed] by the matrix of its expert, of w [experts, summed,
    made]: [tokens, experts, made]; `ids` [tokens, experts] as `to_experts` sent them."""
    return x.graph.apply(ExpertProduct(w.shape.dim(of_experts(ids))), x, w, ids)


def of_experts(ids: Tensor) -> str:
    """The name of the experts' dimension."""
    thin = ids.shape.sparse
    assert thin is not None, "ids that to_experts sent"
    return thin.name
