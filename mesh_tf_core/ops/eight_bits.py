"""Numbers in eight bits for the state of optimizers, with the codes of bitsandbytes (Dettmers et al. 2022,
"8-bit optimizers via block-wise quantization", section 2.1).

A row, all elements along one dimension, has one float32 number, its largest absolute value, and each element
a code of its part x of that. A decade 10^(d-7) to 10^(d-6), d from 0 to 6, is divided evenly into 2^d codes,
or twice as many without signs; a code means the middle of its part, 0 is 0, and one code is 1: a row whose
largest number were the middle of the last part would shrink at every store. The nearest code is taken. As in
bitsandbytes, -1 has no code: a largest number below 0 is stored as 0.993 of it.

bitsandbytes has such a number for 256 consecutive elements of a device. Rows give the same numbers under
every layout, which may split them: then the largest value is found over devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.float8 import AbsMax, scaled
from mesh_tf_core.ops.kinds import Elementwise, NoGradient

SHORTEST, SMALLEST = 64, 4096
"""Least elements of a row; tensors with fewer than 4096 stay in float32 (bitsandbytes' `min_8bit_size`)."""
DECADES, NO_SIGN, _TINY = range(7), 128.0, 1e-38
_ONE = {True: -128.0, False: 1 - NO_SIGN}  # Whether there are signs -> the code of 1, which no decade has.


@dataclass(frozen=True)
class _EightBits(NoGradient, Elementwise, abstract=True):
    """Codes, or the numbers that they mean, given the largest of each row.

    Attributes:
      signed: whether there are numbers below 0; without, codes begin at -128.
    """

    signed: bool
    dtype: ClassVar[str]
    element_flops: ClassVar[float] = 6.0 * len(DECADES)

    def roles(self, *inputs: TensorType) -> Roles:
        return super().roles(inputs[0])

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(inputs[0].shape, self.dtype)

    def decade(self, d: int) -> tuple[int, float, float]:
        """Its number of codes, which begin with this one, its smallest number, and their distance."""
        n = 1 << (d + (not self.signed))
        return n, 10.0 ** (d - 6) * (0.1 + 0.45 / n), 10.0 ** (d - 6) * 0.9 / n


@dataclass(frozen=True)
class ToEightBits(_EightBits):
    """The codes of float32 numbers."""

    dtype: ClassVar[str] = "int8"

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        def by(fn: str, x: Any, number: float) -> Any:
            return k.binary(fn, x, k.scalar(number, "float32"))

        x, its = (t.shape for t in at.inputs)
        part = scaled(k, slices[0], x, k.unary("reciprocal", by("max", slices[1], _TINY)), its)
        size, code = k.unary("abs", part), by("mul", part, 0.0)
        for d in DECADES:
            n, first, step = self.decade(d)
            place = k.unary("floor", by("sub", by("mul", size, 1 / step), first / step - 0.5))
            place = by("add", by("max", by("min", place, n - 1.0), 0.0), float(n))
            # Between the last number of the decade below, if there is one, and the first of this one.
            begin = (first + 10.0 ** (d - 7) * (1 - 0.9 / n) * (d > 0)) / 2
            code = k.where(by("ge", size, begin), place, code)
        code = k.binary("mul", code, k.unary("sign", part)) if self.signed else by("sub", code, NO_SIGN)
        # `n` is the last decade's: 1 is nearer than its last number from a quarter of a distance below 1.
        code = k.where(by("ge", part, 1 - 0.225 / n), k.scalar(_ONE[self.signed], "float32"), code)
        return k.cast(code, self.dtype)


@dataclass(frozen=True)
class FromEightBits(_EightBits):
    """The float32 numbers of codes."""

    dtype: ClassVar[str] = "float32"

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        def by(fn: str, x: Any, number: float) -> Any:
            return k.binary(fn, x, k.scalar(number, "float32"))

        x, its = (t.shape for t in at.inputs)
        given = k.cast(slices[0], "float32")
        code, found = (
            k.unary("abs", given) if self.signed else by("add", given, NO_SIGN),
            by("mul", given, 0.0),
        )
        for d in DECADES:
            n, first, step = self.decade(d)
            value = by("add", by("mul", code, step), first - n * step)
            found = k.where(by("ge", code, n), value, found)
        found = k.binary("mul", found, k.unary("sign", given)) if self.signed else found
        found = k.where(by("eq", given, _ONE[self.signed]), k.scalar(1.0, "float32"), found)
        return scaled(k, found, x, slices[1], its)


def row_of(variable: Variable) -> str:
    """The dimension along which a variable's rows are, its smallest one that is long enough; "": it stays in
    float32. Stacked layers are variables of their own, as those that no loop runs."""
    own = variable.shape.dims[variable.stacked :]
    rows = [(d.size, d.name) for d in own if d.size >= SHORTEST]
    return min(rows)[1] if rows and Shape(own).size >= SMALLEST else ""


def largest(x: Tensor, row: str) -> Tensor:
    """The largest absolute value of each row, float32."""
    found: Tensor = x.graph.apply(AbsMax((row,)), x)
    return found
