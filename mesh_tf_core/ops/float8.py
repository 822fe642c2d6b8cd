"""Products of 8-bit factors, each scaled by its own largest element.

  (1)  s_x = the largest power of two with s_x max |x| <= largest number of the format
  (2)  y = (e4m3(s_x x) e4m3(s_w w)) / (s_x s_w)       forward
  (3)  dx = (e5m2(s_d dy) e4m3(s_w w)) / (s_d s_w)      dw likewise

(Micikevicius et al. 2022, "FP8 formats for deep learning": e4m3 for weights and activations, e5m2 for
gradients, one scale for a tensor; the scale is that of the tensor itself, "current scaling", as in NVIDIA's
Transformer Engine; powers of two as in DeepSeek-V3, section 3.3.2, so that scaling and its inverse are
exact.) Products add up in float32. Backward keeps the factors of eight bits.

The largest element is that of the whole tensor, over all devices, so numbers are the same under every layout.
If the tensor is split, this costs a message of one number. With microbatches each part has its own
(`StepCopies.scales`).

Chips without such a unit (A100, TPUs before v7) and the CPU engines multiply the same numbers in a wider
type: the results are the same, and priced at that type's rate.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType, Work
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ir.traits import StepCopies
from mesh_tf_core.ops.basic import cast, stop_gradient
from mesh_tf_core.ops.common import joined, listing
from mesh_tf_core.ops.custom import custom_gradient
from mesh_tf_core.ops.einsum import Einsum, broadcast
from mesh_tf_core.ops.kinds import Elementwise

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
"""Format -> its largest number (Micikevicius et al. 2022, table 1)."""
_POWERS = 2.0 ** np.arange(-60, 61)
"""Scales: of tensors whose largest element lies beyond, numbers are lost to zero, or infinite."""


@dataclass(frozen=True)
class AbsMax(StepCopies):
    """The largest absolute value, float32, which scales a tensor."""

    kind: ClassVar[str] = "reduce"
    scales: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(reduced=inputs[0].shape.names, combine="max")

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(Shape(), "float32")

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        most = k.reduce("max", k.unary("abs", slices[0]), range(len(at.inputs[0].shape)))
        return k.cast(most, "float32")

    def flops(self, *local: TensorType) -> float:
        return 2.0 * local[0].shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (None,)


@dataclass(frozen=True)
class ScaleFor(Op):
    """The scale (1) of a format, from the largest absolute value."""

    format: str

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles()

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        powers = k.array(_POWERS, "float32")
        fits = k.binary("le", k.binary("mul", powers, slices[0]), k.scalar(LARGEST[self.format], "float32"))
        return k.reduce("max", k.where(fits, powers, k.scalar(_POWERS[0], "float32")), [0])

    def flops(self, *local: TensorType) -> float:
        return 2.0 * len(_POWERS)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (None,)


@dataclass(frozen=True)
class Quantize(Elementwise):
    """x times a scale, rounded to a format of eight bits."""

    format: str

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape, self.format)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.cast(k.binary("mul", k.cast(slices[0], "float32"), slices[1]), self.format)

    def flops(self, *local: TensorType) -> float:
        return 2.0 * local[0].shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (None, None)


@dataclass(frozen=True)
class ScaledEinsum(Einsum):
    """Einsum of two tensors of eight bits, divided by their scales, in another dtype."""

    dtype: str = "float32"

    def infer(self, *inputs: TensorType) -> TensorType:
        super().infer(*(TensorType(t.shape, "float32") for t in inputs[:2]))
        return TensorType(self.output, self.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        letters = dict(zip(joined("einsum", at.inputs[:2]).names, string.ascii_letters, strict=False))
        terms = ["".join(letters[n] for n in t.shape.names) for t in at.inputs[:2]]
        out = "".join(letters[n] for n in self.output.names)
        made = k.einsum(",".join(terms) + "->" + out, *slices[:2])
        # One after the other: their product may be too large or too small for a number.
        for scale in slices[2:]:
            made = k.binary("mul", made, k.unary("reciprocal", scale))
        return k.cast(made, self.dtype)

    def flops(self, *local: TensorType) -> float:
        return super().flops(*local[:2])

    def work(self, *local: TensorType) -> Work:
        return super().work(*local[:2])

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        raise UserError("scaled_einsum: 8-bit operands have no gradient; use mtf.float8_einsum")

    def unreduced(self, dim: Dim, inputs: Sequence[Tensor]) -> Tensor | None:
        op = ScaledEinsum(Shape([dim, *self.output]), self.needed, self.dtype)
        out: Tensor = inputs[0].graph.apply(op, *inputs)
        return out

    def distributes(self, constant: Sequence[bool]) -> bool:
        return False


def quantized(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """x in a format of eight bits, and its scale as a float32 scalar."""
    scale = x.graph.apply(ScaleFor(format), x.graph.apply(AbsMax(), x))
    return x.graph.apply(Quantize(format), x, scale), scale


def float8_einsum(xs: Sequence[Tensor], output: Shape | Sequence[Dim], needed: float = 1.0) -> Tensor:
    """`einsum` of two tensors in float8: e4m3 forward, e5m2 for the gradient of the result.

    Each tensor is scaled by its own largest element.

    Args:
      xs: two tensors of one float dtype, such as bfloat16, which is also the dtype of the result.
      needed: as of `einsum`.
    """
    shape = Shape(output)
    types = [x.type for x in xs]
    if len(xs) != 2 or types[0].dtype != types[1].dtype or not is_float(types[0].dtype):
        raise UserError(f"float8_einsum of {listing(types)}: expected two operands of the same float dtype")
    kept = [_factor(x) for x in xs]

    def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Shape) -> Tensor:
        (x, s), (y, t) = a, b
        made: Tensor = x.graph.apply(ScaledEinsum(out, needed, types[0].dtype), x, y, s, t)
        return made

    def backward(dys: list[Tensor | None], given: list[Tensor], made: list[Tensor]) -> list[Tensor]:
        (dy,) = dys
        assert dy is not None  # else nothing would ask
        slope, found = quantized(dy, E5M2), []
        for x, other in zip(given, reversed(kept), strict=True):
            there = {*dy.shape.names, *other[0].shape.names}
            dx = product(slope, other, Shape(d for d in x.shape if d.name in there))
            found.append(broadcast(cast(dx, x.dtype), x.shape))
        return found

    out: Tensor = custom_gradient(  # type: ignore[assignment]
        lambda *_: product(kept[0], kept[1], shape), backward, xs
    )
    return out


def _factor(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor in the format of factors, once for all that it is multiplied by, as queries, keys and values
    are made of one."""
    made: tuple[Tensor, Tensor] = x.graph.once((E4M3, x.id), lambda: quantized(stop_gradient(x), E4M3))
    return made
