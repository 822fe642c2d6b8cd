"""Products of 8-bit factors with scales.

  (1)  s_x = the largest power of two with s_x max |x| <= largest number of the format
  (2)  y = (q(s_x x) q(s_w w)) / (s_x s_w), likewise dx of dy and w, and dw of x and dy

`RECIPES` says which elements have a scale together, and the formats. The scale is that of the elements
themselves ("current scaling" in NVIDIA's Transformer Engine), or fixed. Powers of two make scaling and its
inverse exact, as in the MX formats and in DeepSeek-V3 (section 3.3.2). Products add up in float32. Where the
elements of a scale are those that a product sums, each product has factors of its own. Backward keeps factors
of eight bits.

The largest element is found over all devices, so numbers are the same under every layout. If the elements of
one scale are split, this costs a small message; training software mostly takes those of its own rank. With
microbatches each part has its own (`Op.scales`).

Chips without such a unit (A100, TPUs before v7) and the CPU engines multiply the same numbers in a wider
type: the results are the same, and priced at that type's rate. Where scales differ along what is summed, all
engines here do so, and the price is that of a kernel with such scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType, Work
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Constant, cast, stop_gradient
from mesh_tf_core.ops.custom import custom_gradient
from mesh_tf_core.ops.einsum import Einsum, broadcast
from mesh_tf_core.ops.experts import ExpertOuter, ExpertProduct, of_experts
from mesh_tf_core.ops.float8_recipes import E4M3, LARGEST, RECIPES, Float8Recipe, recipe_named
from mesh_tf_core.ops.kinds import Elementwise, NoGradient, listing
from mesh_tf_core.ops.shape import Rename, rename

_LEAST, _BITS = 2.0**-60, (64, 32, 16, 8, 4, 2, 1)
"""The least scale, and the steps in which a larger one is found. Where the largest element is not between
2^-59 and 2^60, numbers are lost to zero or infinite."""


@dataclass(frozen=True)
class AbsMax(NoGradient):
    """The largest absolute value, float32, over some dimensions and blocks along another.

    Attributes:
      over: names of the dimensions.
      along: the dimension with blocks; "": none.
      block: consecutive elements of a block.
    """

    over: tuple[str, ...]
    along: str = ""
    block: int = 1
    kind: ClassVar[str] = "reduce"
    scales: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        kept = tuple(n for n in inputs[0].shape.names if n not in self.over)
        return Roles(parallel=kept, reduced=self.over, combine="max")

    def infer(self, *inputs: TensorType) -> TensorType:
        kept = [d for d in inputs[0].shape if d.name not in self.over]
        dims = [Dim(d.name, d.size // self.block) if d.name == self.along else d for d in kept]
        return TensorType(Shape(dims), "float32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, made = at.inputs[0].shape, at.outputs[0].shape
        cut, places = _cut(x, made)
        most = k.reduce("max", k.reshape(k.unary("abs", slices[0]), cut), places)
        return k.cast(most, "float32")

    def flops(self, *local: TensorType) -> float:
        return 2.0 * local[0].shape.size


def _cut(x: Shape, scale: Shape) -> tuple[list[int], list[int]]:
    """Sizes of x in blocks of one scale, and the places of what a scale is one for."""
    cut: list[int] = []
    places: list[int] = []
    for d in x:
        blocks = scale.dim(d.name).size if d.name in scale.names else 0
        cut += [blocks, d.size // blocks] if 0 < blocks < d.size else [d.size]
        places += [len(cut) - 1] if blocks < d.size else []
    return cut, places


def scaled(k: Kernel, x: Any, shape: Shape, scale: Any, its: Shape) -> Any:
    """x times its scales, in float32."""
    if not its.names:
        return k.binary("mul", k.cast(x, "float32"), scale)
    cut, places = _cut(shape, its)
    wide = k.reshape(scale, [1 if i in places else size for i, size in enumerate(cut)])
    return k.reshape(k.binary("mul", k.reshape(k.cast(x, "float32"), cut), wide), shape.sizes)


@dataclass(frozen=True)
class ScaleFor(NoGradient, Elementwise):
    """The scales (1) of a format, from the largest absolute values."""

    format: str
    element_flops: ClassVar[float] = 4.0 * len(_BITS)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        most, largest = slices[0], k.scalar(LARGEST[self.format], "float32")
        found = k.broadcast_to(k.scalar(_LEAST, "float32"), at.outputs[0].shape.sizes)
        for bits in _BITS:
            more = k.binary("mul", found, k.scalar(2.0**bits, "float32"))
            found = k.where(k.binary("le", k.binary("mul", more, most), largest), more, found)
        return found


@dataclass(frozen=True)
class Quantize(Elementwise):
    """x times its scales, rounded to a format of eight bits; `cut`: beyond its largest number, to this.

    Attributes:
      stored: the scale of a variable that is made so as it is stored, as casts are: what devices gather of it
        has eight bits. 0: the scales are an operand.
    """

    format: str
    cut: bool = False
    stored: float = 0.0

    @property
    def converts(self) -> bool:  # type: ignore[override]
        return self.stored > 0

    def roles(self, *inputs: TensorType) -> Roles:
        return super().roles(inputs[0])

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape, self.format)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        own = [k.scalar(self.stored, "float32")] if self.stored else slices[1:]
        its = Shape() if self.stored else at.inputs[1].shape
        made = scaled(k, slices[0], at.inputs[0].shape, own[0], its)
        if self.cut:
            most, least = (k.scalar(sign * LARGEST[self.format], "float32") for sign in (1.0, -1.0))
            made = k.binary("max", k.binary("min", made, most), least)
        return k.cast(made, self.format)

    def flops(self, *local: TensorType) -> float:
        return (4.0 if self.cut else 2.0) * local[0].shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (None,) * len(inputs)


@dataclass(frozen=True)
class Dequantize(Quantize):
    """Numbers of eight bits divided by their scales, in another format."""

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        back = k.unary("reciprocal", slices[1])
        return k.cast(scaled(k, slices[0], at.inputs[0].shape, back, at.inputs[1].shape), self.format)


@dataclass(frozen=True)
class ScaledProduct(Op, abstract=True):
    """A product whose first two operands have eight bits; the last two are their scales, by which it is
    divided. The result has another dtype."""

    dtype: str = "float32"

    @staticmethod
    def _wide(types: Sequence[TensorType]) -> list[TensorType]:
        return [TensorType(t.shape, "float32" if i < 2 else t.dtype) for i, t in enumerate(types[:-2])]

    def roles(self, *inputs: TensorType) -> Roles:
        return super().roles(*self._wide(inputs))

    def infer(self, *inputs: TensorType) -> TensorType:
        made = super().infer(*self._wide(inputs))
        assert isinstance(made, TensorType)
        return TensorType(made.shape, self.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        back = [k.unary("reciprocal", scale) for scale in slices[-2:]]
        pairs = zip(slices[:2], at.inputs[:2], back, at.inputs[-2:], strict=True)
        wide = [scaled(k, x, t.shape, scale, its.shape) for x, t, scale, its in pairs]
        inside = replace(at, inputs=tuple(self._wide(at.inputs)))
        return k.cast(super().kernel(k, inside, *wide, *slices[2:-2]), self.dtype)

    def flops(self, *local: TensorType) -> float:
        return super().flops(*local[:-2])

    def work(self, *local: TensorType) -> Work:
        return super().work(*local[:-2])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        raise UserError(f"{self.name}: 8-bit operands have no gradient; use mtf.float8_einsum")


@dataclass(frozen=True)
class ScaledEinsum(ScaledProduct, Einsum):
    """Einsum of two tensors of eight bits."""

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        """Where a scale is one for a tensor, a library may have a kernel for eight bits."""
        if any(t.shape.names for t in at.inputs[2:]):
            return super().kernel(k, at, *slices)
        made = Einsum(self.output).kernel(k, replace(at, inputs=at.inputs[:2]), *slices[:2])
        # One after the other: their product may be too large or too small for a number.
        for scale in slices[2:]:
            made = k.binary("mul", made, k.unary("reciprocal", scale))
        return k.cast(made, self.dtype)

    def unreduced(self, dim: Dim, inputs: Sequence[Tensor]) -> Tensor | None:
        op = ScaledEinsum(Shape([dim, *self.output]), self.needed, self.dtype)
        out: Tensor = inputs[0].graph.apply(op, *inputs)
        return out

    def distributes(self, constant: Sequence[bool]) -> bool:
        return False


@dataclass(frozen=True)
class ScaledExpertProduct(ScaledProduct, ExpertProduct):
    """Rows of eight bits times the matrix of their expert."""


@dataclass(frozen=True)
class ScaledExpertOuter(ScaledProduct, ExpertOuter):
    """The gradient of the experts' matrices, of rows of eight bits."""


_Factor = tuple[Tensor, Tensor]
"""A tensor of eight bits and its scales."""


def quantized(
    x: Tensor,
    format: str,
    recipe: Float8Recipe = RECIPES["tensor"],
    summed: Sequence[str] = (),
    weight: bool = False,
    stored: bool = False,
) -> tuple[Tensor, Tensor]:
    """x in a format of eight bits, and its float32 scales.

    Args:
      summed: names of the dimensions that a product sums.
      stored: a weight with a fixed scale is made so as it is stored.
    """
    if recipe.limit and format == E4M3:
        times = LARGEST[format] / recipe.limit
        scale = x.graph.apply(Constant(times, "float32"))
        operands = [x] if stored else [x, scale]
        return x.graph.apply(Quantize(format, True, times if stored else 0.0), *operands), scale
    over, along = recipe.parts(x.shape, summed, weight)
    block = recipe.scaled if along and isinstance(recipe.scaled, int) else 1
    scale = x.graph.apply(ScaleFor(format), x.graph.apply(AbsMax(over, along, block), x))
    return x.graph.apply(Quantize(format), x, scale), scale


def float8_einsum(
    xs: Sequence[Tensor],
    output: Shape | Sequence[Dim],
    needed: float = 1.0,
    recipe: str = "tensor",
    again: Tensor | None = None,
) -> Tensor:
    """`einsum` of two tensors in float8.

    Args:
      xs: two tensors of one float dtype, such as bfloat16, which is also the dtype of the result. Backward
        keeps the factor that is made of the first one, and makes that of the second one, a weight, anew.
      needed: as of `einsum`.
      recipe: one of `RECIPES`.
      again: the first one as backward has it (`layers.base.gated`), of which the kept factor is made.
    """
    shape = Shape(output)
    types = [x.type for x in xs]
    if len(xs) != 2 or types[0].dtype != types[1].dtype or not is_float(types[0].dtype):
        raise UserError(f"float8_einsum of {listing(types)}: expected two operands of the same float dtype")
    x, w = xs
    dx, dw = (Shape(d for d in a.shape if d in {*shape, *b.shape}) for a, b in ((x, w), (w, x)))
    forward, of_x, of_w = (ScaledEinsum(out, needed, x.dtype) for out in (shape, dx, dw))
    return _product(x, w, (), recipe, (forward, of_x, of_w), (shape, dx, dw), again)


def float8_expert_product(
    x: Tensor, w: Tensor, ids: Tensor, recipe: str, again: Tensor | None = None
) -> Tensor:
    """`ops.experts.expert_product` in float8; `again` as of `float8_einsum`."""
    experts = w.shape.dim(of_experts(ids))
    forward = ScaledExpertProduct(experts, x.dtype)
    made = forward.infer(x.type, w.type, ids.type, x.type, w.type).shape
    products = (forward, forward, ScaledExpertOuter(experts, x.dtype))
    return _product(x, w, (ids,), recipe, products, (made, x.shape, w.shape), again)


def _product(
    x: Tensor,
    w: Tensor,
    ids: tuple[Tensor, ...],
    recipe: str,
    ops: tuple[Op, Op, Op],
    shapes: tuple[Shape, Shape, Shape],
    again: Tensor | None,
) -> Tensor:
    """A product and its gradients; `again` as of `float8_einsum`.

    Args:
      ops, shapes: of the product, of dx and of dw.
    """
    how, graph = recipe_named(recipe), x.graph

    def product(op: Op, out: Shape, a: _Factor, b: _Factor) -> Tensor:
        made: Tensor = graph.apply(op, a[0], b[0], *ids, a[1], b[1])
        return made

    kept = _factor(x if again is None else again, shapes[2], E4M3, recipe)

    def backward(dys: list[Tensor | None], given: list[Tensor], made: list[Tensor]) -> list[Tensor]:
        (dy,) = dys
        assert dy is not None  # else nothing would ask
        slopes = [_factor(dy, out, how.backward, recipe) for out in shapes[1:]]
        weight = _factor(given[1], shapes[1], E4M3, recipe, True, bool(ids))
        dx = product(ops[1], shapes[1], slopes[0], weight)
        dw = product(ops[2], shapes[2], kept, slopes[1])
        return [broadcast(cast(d, t.dtype), t.shape) for d, t in ((dx, x), (dw, w))]

    def forward(*_: Tensor) -> Tensor:
        weight = _factor(w, shapes[0], E4M3, recipe, True, bool(ids))
        return product(ops[0], shapes[0], _factor(x, shapes[0], E4M3, recipe), weight)

    out: Tensor = custom_gradient(forward, backward, [x, w])  # type: ignore[assignment]
    return out


def in_eight_bits(x: Tensor, dim: str, recipe: str) -> Tensor:
    """x as a recipe's eight bits know it, with scales along a dimension, and without a gradient."""
    values, scales = quantized(stop_gradient(x), E4M3, recipe_named(recipe), (dim,))
    found: Tensor = x.graph.apply(Dequantize(x.dtype), values, scales)
    return found


def _factor(
    x: Tensor, out: Shape, format: str, recipe: str, weight: bool = False, stored: bool = False
) -> _Factor:
    """A tensor as a factor of a product, once for all that it is multiplied by, as queries, keys and values
    are made of one, whatever they call its dimensions: then one tensor of eight bits is kept, and sent."""
    summed = tuple(n for n in x.shape.names if n not in out.names)
    op, operands = x.graph.maker(x)
    new = dict(op.names) if isinstance(op, Rename) else {}
    old, source = {after: before for before, after in new.items()}, operands[0] if new else x
    summed, how = tuple(old.get(n, n) for n in summed), RECIPES[recipe]
    key = (format, recipe, *how.parts(source.shape, summed, weight), source.id)
    made = x.graph.once(key, lambda: quantized(stop_gradient(source), format, how, summed, weight, stored))
    values, scales = (rename(t, **{n: new[n] for n in t.shape.names if n in new}) for t in made)
    return values, scales
