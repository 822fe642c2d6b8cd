"""The parts that forward and backward of attention share: dimensions, the order of operands, work (see
`attention` for the mathematics)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, cast

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import BLOCKS, At, Attending, Kernel, PartRows
from mesh_tf_core.ir.op import Op, TensorType, Work
from mesh_tf_core.ops.random import places_of
from mesh_tf_core.ops.random import rows as rows_of
from mesh_tf_core.visible import Visible

DRAWN = ("key", "part")
"""The operands that random numbers are drawn by: a key, and the number of a part of the batch."""
EXTRAS = ("bias", "mask", "segments", "memory_segments", *DRAWN)
"""Optional operands besides query, key and value, in this order."""
PLACES = ("place", "memory_place")
"""The further operands of a ring's pieces [ring]: the positions of the first query and of the first key."""


@dataclass(frozen=True)
class Sides:
    """The dimensions of an attention.

    Attributes:
      shared: dimensions of both queries and keys, besides the one that is summed.
      group: dimensions of queries that share a key, besides their positions.
      width: the values' own dimension.
      rows: shared, group and the positions of queries.
      logits: rows and the positions of keys.
    """

    shared: Shape
    group: Shape
    width: Dim
    rows: Shape
    logits: Shape


@dataclass(frozen=True)
class _Laid:
    """An operand without elements, and how a kernel orders its axes."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def reshape(x: _Laid, shape: Sequence[int]) -> _Laid:
        return replace(x, shape=tuple(shape))

    @staticmethod
    def transpose(x: _Laid, permutation: Sequence[int]) -> _Laid:
        return replace(x, shape=tuple(x.shape[i] for i in permutation))


@dataclass(frozen=True)
class AnyAttention(Op, abstract=True):
    """The base of attention and of its gradients.

    Attributes:
      d_kv: name of the dimension that queries and keys are multiplied over.
      length, memory: positions of queries and of keys.
      scale, causal, window, extra_logit, partial, rate: see `Attending`.
      apart: the position of the first query, for pieces of a ring: one of `PLACES`; keys begin at 0.
      positions: of queries on all devices, where dropout is by `PLACES`.
      rows: of the whole batch, those that a part of it has, where it has dropout.
      extras: which of `EXTRAS` and of `PLACES` there are.
    """

    d_kv: str
    length: Dim
    memory: Dim
    scale: float
    causal: bool = False
    window: int = 0
    extra_logit: float | None = None
    rate: float = 0.0
    partial: bool = False
    apart: tuple[int, ...] = (0,)
    positions: int = 0
    rows: PartRows | None = None
    extras: tuple[str, ...] = ()
    kind: ClassVar[str] = "attention"
    products: ClassVar[tuple[int, int]] = (1, 1)
    """The number of products over the width of the keys, and over that of the values."""
    again: ClassVar[tuple[int, int]] = (0, 0)
    """The number of them that another operation of the step already computed."""
    twice: ClassVar[tuple[int, int]] = (0, 0)
    """The number of them that a TPU's kernels make twice."""
    softmax: ClassVar[tuple[int, int]] = (6, 1)
    """Operations of a TPU's vector unit for a logit, and how often positions are compared: three more each
    time."""
    handed: ClassVar[tuple[int, int]] = (2, 2)
    """The number of arrays of the queries' rows (query, result) and of the keys' that are given to a TPU's
    kernels and taken from them."""

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise UserError(f"attention, dropout: rate must be at least 0 and less than 1, found {self.rate}")
        if self.window < 0:
            raise UserError(f"attention: window must be at least 0 positions, found {self.window}")

    def describe(self) -> str:
        chosen = [f.name for f in fields(self)[4:-1] if getattr(self, f.name) != f.default]
        said = [n if getattr(self, n) is True else f"{n}={getattr(self, n)}" for n in chosen]
        return f"{self.name}({', '.join([self.length.name, self.memory.name, *said, *self.extras])})"

    def sides(self, query: TensorType, key: TensorType, value: TensorType) -> Sides:
        """The dimensions of pieces of these types."""
        apart = (self.d_kv, self.length.name)
        shared = Shape(d for d in query.shape if d.name in key.shape.names and d.name not in apart)
        group = query.shape.without(*shared.names, *apart)
        width = next(d for d in value.shape if d.name == self.d_kv or d.name not in key.shape.names)
        rows = Shape([*shared, *group, query.shape.dim(self.length.name)])
        return Sides(shared, group, width, rows, Shape([*rows, key.shape.dim(self.memory.name)]))

    @property
    def crosses(self) -> tuple[str, ...]:  # type: ignore[override]
        """Its keys' positions, and its queries'."""
        return self.memory.name, self.length.name

    def whole(self, sides: Sides) -> dict[str, str]:
        """Dimensions that every device needs all of, and why."""
        return {
            self.d_kv: "a logit is a sum over the whole dimension",
            sides.width.name: "a row of the result is computed in one piece",
            self.memory.name: "a softmax runs over the whole dimension",
        }

    def of_part(self, rows: PartRows) -> tuple[Op, int] | None:
        extras = *self.extras, DRAWN[-1]
        return (replace(self, rows=rows, extras=extras), 2 + len(extras)) if self.rate else None

    def attending(self, k: Kernel, at: At, slices: Sequence[Any]) -> Attending:
        """A device's pieces, in the order that kernels take them in."""
        sides = self.sides(*at.inputs[:3])
        shared, rows = sides.shared.names, sides.rows
        orders = (
            (*rows.names, self.d_kv),
            (*shared, self.memory.name, self.d_kv),
            (*shared, self.memory.name, sides.width.name),
        )
        factors = [ordered(k, *xto) for xto in zip(slices, at.inputs, orders, strict=False)]
        given = {
            name: x if name in DRAWN else ordered(k, x, t, sides.logits.names)
            for name, x, t in zip(self.extras, slices[3:], at.inputs[3:], strict=False)
        }
        noise = None
        if self.rate:
            noise = self._noise(k, at, rows, given)
        query, key, value = factors
        return Attending(
            query,
            key,
            value,
            shared=len(shared),
            first=self._first(k, at, given),
            starts=self._starts(query.shape[-2]),
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            extra_logit=self.extra_logit,
            bias=given.get("bias"),
            mask=given.get("mask"),
            segments=(given["segments"], given["memory_segments"]) if "segments" in given else None,
            partial=self.partial,
            rate=self.rate,
            noise=noise,
        )

    def _noise(self, k: Kernel, at: At, rows: Shape, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Where its random numbers lie among those of one device."""
        places, first = places_of(k, at, self.rows, given.get("part")), 0
        if self.positions:
            query, first = (k.reshape(given[name], ()) for name in PLACES)
            (ring,) = at.inputs[3 + self.extras.index(PLACES[0])].shape.names
            places = {**places, ring: (1, 0), self.length.name: (self.positions, query)}
        columns = (k.reshape(x, (*x.shape, 1)) for x in rows_of(k, at, rows, places))
        return (*columns, given["key"], first)

    def _first(self, k: Kernel, at: At, given: Mapping[str, Any]) -> Any:
        """The position of the first query."""
        if len(self.apart) > 1:
            return k.binary("sub", *(k.reshape(given[name], ()) for name in PLACES))
        first = at.offset(self.length.name)
        return first + self.apart[0] if self.apart[0] else first

    def _starts(self, queries: int) -> tuple[int, ...]:
        """Of pieces of so many queries, where the first may be."""
        own = range(0, self.length.size, queries)
        return tuple(apart + start for apart in self.apart for start in own)

    def flops(self, *local: TensorType) -> float:
        """FLOPs of the products, for queries and keys that the positions let see each other; where queries
        are split, of the device that has most. (The softmax overlaps with them.)"""
        return self._flops(self.products, *local)

    def work(self, *local: TensorType) -> Work:
        """As a product, that of queries and keys; the product of weights and values has about the same size
        and shape."""
        sides = self.sides(*local[:3])
        rows = sides.rows.size // sides.shared.size
        product = sides.shared.size, rows, self.memory.size, local[0].shape.dim(self.d_kv).size
        again, visible = self._flops(self.again, *local), self.visible(sides.rows.sizes[-1])
        return Work(product, again, blocked=self._blocked(*local), visible=visible)

    def _flops(self, products: tuple[int, int], *local: TensorType) -> float:
        sides = self.sides(*local[:3])
        queries = sides.rows.sizes[-1]
        widths = local[0].shape.dim(self.d_kv).size, sides.width.size
        each = sum(2.0 * n * width for n, width in zip(products, widths, strict=True))
        return each * (sides.rows.size // queries) * self.visible(queries).pairs()

    def visible(self, queries: int) -> Visible:
        """The pairs that positions let see each other, of each shard of so many queries."""
        m, back = self.memory.size, self.window or self.length.size
        if not (self.causal or self.window):
            return Visible((0,), queries, m, queries + m, queries + m)
        return Visible(self._starts(queries), queries, m, back, 0 if self.causal else back - 1)

    def _blocked(self, *local: TensorType) -> tuple[float, float, float]:
        """Of Pallas's splash attention (jax/experimental/pallas/ops/tpu/splash_attention). It skips blocks
        without a pair that the positions let see each other, and works out the others as wholes: a product,
        its softmax, which needs whole rows, and the next product, one after the other. Counted from the
        kernels' text: forward takes the maximum, subtracts it, takes the power (scaled to base 2), sums and
        narrows a logit: 6. Backward makes logits and their gradients in two kernels, for queries (6) and for
        keys (7, as it narrows weights too). Where positions matter, a key's position is made, compared and
        selected by. Operands and results pass once more around the kernels: queries are scaled, rows of
        results and their gradients multiplied, heads of fewer than 128 laid out anew."""
        sides = self.sides(*local[:3])
        queries = sides.rows.sizes[-1]
        widths = local[0].shape.dim(self.d_kv).size, sides.width.size
        logits = float(sides.rows.size // queries) * self.visible(queries).pairs(BLOCKS)
        made = map(sum, zip(self.products, self.twice, strict=True))
        operations, compared = self.softmax
        positions = 3 * compared if self.causal or self.window else 0
        products = sum(2.0 * n * width for n, width in zip(made, widths, strict=True))
        rows = sides.rows.size * self.handed[0] + local[1].shape.size // widths[0] * self.handed[1]
        lanes = max(-width % BLOCKS[-1] + width for width in widths)
        return logits * products, logits * (operations + positions), float(rows * lanes)

    def laid(self, *local: TensorType) -> Attending:
        """As libraries get it, where its operands have pieces of these types: shapes and dtypes alone."""
        pieces = [_Laid(t.shape.sizes, t.dtype) for t in local]
        at = At(local, (), frozenset(), lambda name: 0)
        laid = replace(self, rate=0.0, apart=self.apart[:1]).attending(cast(Kernel, _Laid), at, pieces)
        return replace(laid, starts=self._starts(laid.query.shape[-2]), rate=self.rate)


def ordered(k: Kernel, x: Any, t: TensorType, names: Sequence[str]) -> Any:
    """A piece with one axis for each of `names`, in their order; of size 1 where it lacks the dimension."""
    order = sorted(range(len(t.shape)), key=lambda i: names.index(t.shape.names[i]))
    if order != list(range(len(order))):
        x = k.transpose(x, order)
    sizes = dict(zip(t.shape.names, t.shape.sizes, strict=True))
    return k.reshape(x, [sizes.get(name, 1) for name in names])


def back(k: Kernel, x: Any, names: Sequence[str], out: TensorType) -> Any:
    """Transposes a kernel's result, whose axes are `names`, to the order of an output."""
    order = [names.index(name) for name in out.shape.names]
    return k.transpose(x, order) if order != list(range(len(order))) else x
