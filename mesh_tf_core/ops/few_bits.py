"""Numbers in few bits, for slow links: whole numbers of 8 or 4 bits, and a scale for every row, which is the
elements along the last dimension.

  (1)  scale = max |x| / L        code = floor(x / scale + 1/2) in [-L, L],  L = 2^(bits - 1) - 1
  (2)  of 4 bits, a byte holds two neighbours: first + 16 second

The rounding error is at most half a scale. Who sends more later adds it to that (error feedback: Seide et al.
2014, "1-bit SGD"; Karimireddy et al. 2019), so that nothing is lost in the long run.

Once as arrays, for files, and once as operations, for programs: there a row may be split, which costs a
message of its largest element inside, so that the numbers are the same under every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.activations import clip
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.kinds import Elementwise, NoGradient
from mesh_tf_core.ops.math import abs as absolute
from mesh_tf_core.ops.math import floor, greater
from mesh_tf_core.ops.reduce import reduce_max
from mesh_tf_core.ops.shape import pad, slice_dim

WHOLE = 32
"""Bits without rounding."""
BITS = (WHOLE, 8, 4)
DTYPE = "int8"
"""The dtype of packed codes."""


def largest(bits: int) -> int:
    """The largest code."""
    return int(2 ** (bits - 1) - 1)


# -- arrays --------------------------------------------------------------------------------------------------


def quantised(array: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, int8 [..., last * bits / 8, rounded up], and their scales, float32 [...]."""
    x = np.atleast_1d(np.asarray(array, np.float32))
    scales: np.ndarray = np.abs(x).max(axis=-1, initial=0.0) * np.float32(1 / largest(bits))
    steps = np.where(scales > 0, scales, np.float32(1))[..., None]
    codes = np.clip(np.floor(x / steps + np.float32(0.5)), -largest(bits), largest(bits)).astype(DTYPE)
    if bits == 4:
        even = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // 2) * 2), DTYPE)
        even[..., : codes.shape[-1]] = codes
        codes = even[..., ::2] + 16 * even[..., 1::2]
    return codes, scales


def restored(codes: np.ndarray, scales: np.ndarray, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """The array of its codes, float32."""
    whole = codes.astype(np.float32)
    if bits == 4:
        second = np.floor((whole + 8) / 16)
        both = np.stack([whole - 16 * second, second], axis=-1)
        whole = both.reshape(*whole.shape[:-1], 2 * whole.shape[-1])
    last = shape[-1] if shape else 1
    return np.asarray(whole[..., :last] * scales[..., None], np.float32).reshape(shape)


# -- operations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pack(NoGradient, Elementwise):
    """Codes of 4 bits, float32 [..., row, ...], two neighbours along `row` in a byte: int8, half as many."""

    row: str

    def infer(self, *inputs: TensorType) -> TensorType:
        size = inputs[0].shape.dim(self.row).size
        if size % 2:
            raise UserError(f"pack of {inputs[0]}: the size of {self.row!r} must be even; pad it")
        return TensorType(_resized(inputs[0].shape, self.row, size // 2), DTYPE)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        sizes, axis = at.outputs[0].shape.sizes, at.outputs[0].shape.index(self.row) + 1
        pairs = k.reshape(slices[0], [*sizes[:axis], 2, *sizes[axis:]])
        first, second = (
            k.slice(
                pairs,
                [i if n == axis else 0 for n in range(len(sizes) + 1)],
                [*sizes[:axis], 1, *sizes[axis:]],
            )
            for i in (0, 1)
        )
        both = k.binary("add", first, k.binary("mul", second, k.scalar(16.0, "float32")))
        return k.cast(k.reshape(both, sizes), DTYPE)


@dataclass(frozen=True)
class Unpack(NoGradient, Elementwise):
    """The inverse of `Pack`."""

    row: str
    element_flops: ClassVar[float] = 5.0

    def infer(self, *inputs: TensorType) -> TensorType:
        if inputs[0].dtype != DTYPE:
            raise UserError(f"unpack of {inputs[0]}: the codes must have dtype {DTYPE}")
        return TensorType(
            _resized(inputs[0].shape, self.row, 2 * inputs[0].shape.dim(self.row).size), "float32"
        )

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        sizes, axis = at.inputs[0].shape.sizes, at.inputs[0].shape.index(self.row) + 1
        codes = k.reshape(k.cast(slices[0], "float32"), [*sizes[:axis], 1, *sizes[axis:]])
        second = k.unary(
            "floor",
            k.binary("mul", k.binary("add", codes, k.scalar(8.0, "float32")), k.scalar(1 / 16, "float32")),
        )
        first = k.binary("sub", codes, k.binary("mul", second, k.scalar(16.0, "float32")))
        return k.reshape(k.concat([first, second], axis), at.outputs[0].shape.sizes)


def _resized(shape: Shape, name: str, size: int) -> Shape:
    return Shape(Dim(name, size) if d.name == name else d for d in shape)


def coded(x: Tensor, row: Dim | None, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of x, whole numbers as float32 [x], and their scales, float32 [x without the row].

    Args:
      row: the dimension that shares a scale; None: every element has its own.
    """
    x = x.cast("float32")
    most = absolute(x)
    scales = (most if row is None else reduce_max(most, row)) / largest(bits)
    steps = where(greater(scales, 0.0), scales, constant_like(scales, 1.0))
    return clip(floor(x / steps + 0.5), -largest(bits), largest(bits)), scales


def packed(codes: Tensor, row: Dim | None, bits: int) -> Tensor:
    """Codes as they are sent, int8: of 4 bits, with half the row, rounded up."""
    if bits != 4 or row is None:
        return codes.cast(DTYPE)
    sent: Tensor = codes.graph.apply(Pack(row.name), pad(codes, row, 0, row.size % 2))
    return sent


def unpacked(sent: Tensor, row: Dim | None, bits: int) -> Tensor:
    """Unpacks codes to float32."""
    if bits != 4 or row is None:
        return sent.cast("float32")
    return slice_dim(sent.graph.apply(Unpack(row.name), sent), row, 0, row.size)
