"""Tensors of one value, and of an array's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import check_dtype, itemsize
from mesh_tf_core.ir.initializers import FixedArray, check_numbers, numbers, usual_dtype
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Builder, Tensor
from mesh_tf_core.ops.basic import Constant, constant_like
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.kinds import SourceOp

MOST_BYTES = 2**26
"""The largest constant array in bytes: it is part of every compiled program, and compilers fold and copy
constants."""


@dataclass(frozen=True)
class ConstantArray(SourceOp):
    """An array that is known when the model is built. A device makes its own piece of it."""

    array: FixedArray
    shape: Shape
    dtype: str

    @property
    def name(self) -> str:
        return "constant"

    def infer(self, *inputs: TensorType) -> TensorType:
        if self.array.array.shape != self.shape.sizes:
            raise UserError(
                f"constant: [{self.shape}] needs an array of shape {list(self.shape.sizes)}, found shape "
                f"{list(self.array.array.shape)}"
            )
        return TensorType(self.shape, self.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        whole, sizes = self.array.array, at.outputs[0].shape.sizes
        begin = [at.offset(n) for n in self.shape.names]
        if all(isinstance(b, int) for b in begin):
            return k.array(
                whole[tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))], self.dtype
            )
        return k.slice(k.array(whole, self.dtype), begin, sizes)


def constant(
    graph: Builder, value: Any, dims: Shape | Sequence[Dim] = (), dtype: str | None = None
) -> Tensor:
    """A tensor of fixed elements, such as class weights or a table. Nothing trains or stores it.

    Args:
      value: a number for all elements, or an array (NumPy's, JAX's, lists) with the sizes of `dims`, in their
        order, of at most 64 MiB.
      dtype: None: float32; for arrays of integers, truth values or 16-bit numbers, their own dtype (int32 if
        all integers fit).
    """
    array = value if isinstance(value, int | float) else numbers("constant", value)
    if isinstance(array, int | float) or not array.shape:
        one = array if isinstance(array, int | float) else array.item()
        return broadcast(graph.apply(Constant(one, dtype or "float32")), dims)
    shape = dims if isinstance(dims, Shape) else Shape(dims)
    if array.shape != shape.sizes:
        raise UserError(
            f"constant: dimensions [{shape}] need an array of shape {list(shape.sizes)}, found shape "
            f"{list(array.shape)}"
        )
    chosen = check_dtype(dtype or usual_dtype(array))
    check_numbers("constant", array, chosen)
    if shape.size * itemsize(chosen) > MOST_BYTES:
        raise UserError(
            f"constant: [{shape}] would add {shape.size * itemsize(chosen) >> 20} MiB to every program, "
            f"and the limit is {MOST_BYTES >> 20} MiB; make it a variable instead: graph.variable(name, "
            "dims, array, trainable=False)"
        )
    found: Tensor = graph.apply(ConstantArray(FixedArray(array), shape, chosen))
    return found


def zeros(graph: Builder, dims: Shape | Sequence[Dim] = (), dtype: str = "float32") -> Tensor:
    """A tensor of zeros."""
    return constant(graph, 0.0, dims, dtype)


def ones(graph: Builder, dims: Shape | Sequence[Dim] = (), dtype: str = "float32") -> Tensor:
    """A tensor of ones."""
    return constant(graph, 1.0, dims, dtype)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros of the shape and dtype of x."""
    return broadcast(constant_like(x, 0.0), x.shape)


def ones_like(x: Tensor) -> Tensor:
    """Ones of the shape and dtype of x."""
    return broadcast(constant_like(x, 1.0), x.shape)
