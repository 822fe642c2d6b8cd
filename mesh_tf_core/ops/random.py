"""Random numbers that do not depend on the layout: a hash of a key and of the global index of the element.

The hash is two rounds of the 32-bit finaliser `lowbias32` (Wellons, "Prospecting for Hash Functions", 2018),
which a device evaluates for its own elements only.
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
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import StopGradient, constant_like
from mesh_tf_core.ops.einsum import broadcast

_M1, _M2 = 0x7FEB352D, 0x846CA68B
_SECOND = 0x632BE5AB
"""Turns a key into that of a second, independent stream."""


def mix(k: Kernel, x: Any) -> Any:
    """lowbias32 of uint32 values."""
    for multiplier, shift in ((_M1, 16), (_M2, 15), (None, 16)):
        x = k.binary("bit_xor", x, k.binary("shift_right", x, k.scalar(shift, "uint32")))
        if multiplier is not None:
            x = k.binary("mul", x, k.scalar(multiplier, "uint32"))
    return x


NEXT = 0x01000193
"""What the number of an element is multiplied by for the next dimension."""


def numbers(k: Kernel, at: At, shape: Shape) -> Any:
    """The global number of every element of a device's piece, uint32, the same wherever the element lies."""
    index = k.scalar(0, "uint32")
    for axis, d in enumerate(shape):
        positions = k.iota(d.size, "uint32")
        if d.name in at.split:
            positions = k.binary("add", positions, k.scalar(at.offset(d.name), "uint32"))
        # Dimension by dimension: index = mix(index * odd + position) would cost a hash per axis; a polynomial
        # in an odd constant is injective enough before the final mix and costs one multiply-add.
        positions = k.reshape(positions, [d.size if i == axis else 1 for i in range(len(shape))])
        index = k.binary("add", k.binary("mul", index, k.scalar(NEXT, "uint32")), positions)
    return index


def uniform(k: Kernel, index: Any, key: Any) -> Any:
    """float32 in [0, 1) from 24 random bits of every number."""
    bits = mix(k, k.binary("bit_xor", mix(k, index), k.cast(key, "uint32")))
    top = k.binary("shift_right", bits, k.scalar(8, "uint32"))
    return k.binary("mul", k.cast(k.cast(top, "int32"), "float32"), k.scalar(2.0**-24, "float32"))


def _uniform(k: Kernel, at: At, key: Any) -> Any:
    return uniform(k, numbers(k, at, at.outputs[0].shape), key)


@dataclass(frozen=True)
class FoldIn(Op):
    """A new key from a key (int32 scalar) and a number: mix(key * odd + salt)."""

    salt: int
    kind: ClassVar[str] = "data"
    free: ClassVar[bool] = True
    derives_key: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles()

    def infer(self, *inputs: TensorType) -> TensorType:
        for t in inputs:
            if t.dtype != "int32" or len(t.shape):
                raise UserError(f"fold_in: keys are int32 scalars, found {t}")
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        key = k.scalar(self.salt % 2**32, "uint32")
        for x in slices:
            key = mix(
                k,
                k.binary(
                    "bit_xor", k.binary("mul", key, k.scalar(0x9E3779B1, "uint32")), k.cast(x, "uint32")
                ),
            )
        return k.cast(key, "int32")

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return [None] * len(inputs)


@dataclass(frozen=True)
class Dropout(Op):
    """Zeroes a fraction `rate` of x and scales the rest by 1/(1-rate), decided by a key: inputs (x, key)."""

    rate: float
    kind: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise UserError(f"dropout: rate must be in [0, 1), found {self.rate}")

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=inputs[0].shape.names)

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        x, key = slices
        dtype = at.outputs[0].dtype
        keep = k.binary("ge", _uniform(k, at, key), k.scalar(self.rate, "float32"))
        return k.where(keep, k.binary("mul", x, k.scalar(1 / (1 - self.rate), dtype)), k.scalar(0, dtype))

    def flops(self, *local: TensorType) -> float:
        return 20.0 * local[0].shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(self, dy, inputs[1]), None)

    def untrained(self) -> tuple[Op, int]:
        return StopGradient(), 1


@dataclass(frozen=True)
class RandomUniform(Op):
    """Uniform numbers in [low, high) of a shape, from a key."""

    shape: Shape
    low: float
    high: float
    dtype: str
    kind: ClassVar[str] = "random"

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=self.shape.names)

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(self.shape, check_dtype(self.dtype))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        width = k.scalar(self.high - self.low, "float32")
        x = k.binary("add", k.binary("mul", _uniform(k, at, slices[0]), width), k.scalar(self.low, "float32"))
        return k.cast(x, self.dtype)

    def flops(self, *local: TensorType) -> float:
        return 20.0 * self.shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (None,)


@dataclass(frozen=True)
class RandomNormal(Op):
    """Normal numbers of a mean and a standard deviation, from a key (Box & Muller 1958)."""

    shape: Shape
    mean: float
    stddev: float
    dtype: str
    kind: ClassVar[str] = "random"

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=self.shape.names)

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(self.shape, check_dtype(self.dtype))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        def number(value: float) -> Any:
            return k.scalar(value, "float32")

        key = k.cast(slices[0], "uint32")
        second = k.binary("bit_xor", key, k.scalar(_SECOND, "uint32"))
        # 1 - u is in (0, 1], where the logarithm is finite.
        log = k.unary("log", k.binary("sub", number(1.0), _uniform(k, at, key)))
        radius = k.unary("sqrt", k.binary("mul", log, number(-2.0)))
        angle = k.binary("mul", _uniform(k, at, second), number(2 * math.pi))
        x = k.binary("mul", k.binary("mul", radius, k.unary("cos", angle)), number(self.stddev))
        return k.cast(k.binary("add", x, number(self.mean)), self.dtype)

    def flops(self, *local: TensorType) -> float:
        return 60.0 * self.shape.size

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (None,)


def dropout(
    x: Tensor, rate: float, key: Tensor | None = None, noise_shape: Sequence[Dim] | Shape | None = None
) -> Tensor:
    """Dropout with the same mask under every layout; `key` defaults to a new one of the graph, per step and
    layer.

    Args:
      noise_shape: dimensions of x that have masks of their own; along the others all elements are kept or
        zeroed together (None: every element for itself).
    """
    if rate == 0:
        return x
    key = key if key is not None else x.graph.random_key()
    if noise_shape is None:
        return x.graph.apply(Dropout(rate), x, key)
    noise = Shape(noise_shape)
    for d in noise:
        if x.shape.dim(d.name) != d:
            raise UserError(f"dropout of [{x.shape}]: noise_shape has {d}, x has {x.shape.dim(d.name)}")
    ones = broadcast(constant_like(x, 1.0), noise)
    return x * x.graph.apply(Dropout(rate), ones, key)


def random_uniform(
    key: Tensor, shape: Shape | Sequence[Dim], low: float = 0.0, high: float = 1.0, dtype: str = "float32"
) -> Tensor:
    """Uniform numbers in [low, high)."""
    return key.graph.apply(RandomUniform(Shape(shape), low, high, dtype), key)


def random_normal(
    key: Tensor,
    shape: Shape | Sequence[Dim],
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: str = "float32",
) -> Tensor:
    """Normal numbers."""
    return key.graph.apply(RandomNormal(Shape(shape), mean, stddev, dtype), key)
