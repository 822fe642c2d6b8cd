"""Helpers that operations share: alignment by name, checks, roles of element-wise work."""

import math
from collections.abc import Sequence
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape, union
from mesh_tf_core.ir.dtypes import is_float, promote, whole_numbers
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType


def listing(inputs: Sequence[TensorType]) -> str:
    """The operands in words, for errors."""
    return ", ".join(map(str, inputs))


def joined(op: str, inputs: Sequence[TensorType]) -> Shape:
    """Dimensions of a broadcast by name: those of the largest operand first."""
    try:
        return union(*sorted((t.shape for t in inputs), key=len, reverse=True))
    except UserError as e:
        raise UserError(f"{op}: {e}") from None


def same_dtype(op: str, inputs: Sequence[TensorType]) -> str:
    """The operands' dtype; a UserError that lists them if they differ."""
    dtype = inputs[0].dtype
    for t in inputs[1:]:
        try:
            promote(dtype, t.dtype)
        except UserError as e:
            raise UserError(f"{op} of {listing(inputs)}: {e}") from None
    return dtype


def dim_name(dim: Dim | str) -> str:
    """The name of a dimension that is given by itself or by name."""
    return dim.name if isinstance(dim, Dim) else dim


def all_parallel(*inputs: TensorType) -> Roles:
    """Every dimension may be split: element-wise work."""
    return Roles(parallel=tuple(dict.fromkeys(n for t in inputs for n in t.shape.names)))


def align(k: Kernel, x: Any, names: Sequence[str], output: Sequence[str], sizes: Sequence[int]) -> Any:
    """Makes `x`, whose axes are `names`, broadcast against axes `output` (NumPy rules); sizes are x's own."""
    if tuple(names) == tuple(output[len(output) - len(names) :]):
        return x
    order = sorted(range(len(names)), key=lambda i: output.index(names[i]))
    if order != list(range(len(names))):
        x = k.transpose(x, order)
    kept = {names[i]: sizes[i] for i in order}
    shape = [kept.get(n, 1) for n in output]
    while len(shape) > len(names) and shape[0] == 1 and output[len(output) - len(shape)] not in kept:
        shape.pop(0)
    return k.reshape(x, shape)


def aligned(k: Kernel, at: At, slices: Sequence[Any]) -> list[Any]:
    """All slices of an operation aligned to its first output."""
    output = at.outputs[0].shape.names
    return [align(k, x, t.shape.names, output, t.shape.sizes) for x, t in zip(slices, at.inputs, strict=True)]


def check_number(op: str, value: float, dtype: str) -> None:
    """UserError if a dtype cannot represent a number: a fraction beside integers is never truncated."""
    if is_float(dtype):
        return
    low, high = whole_numbers(dtype)
    if value != value or value in (math.inf, -math.inf) or value != int(value):
        raise UserError(
            f"{op} of {dtype} and {value}: {dtype} cannot represent {value}; cast the tensor first, e.g. "
            "with .cast('float32')"
        )
    if not low <= value <= high:
        raise UserError(
            f"{op} of {dtype} and {value:.0f}: {dtype} represents only {low} to {high}; cast the tensor "
            "first, e.g. with .cast('float32')"
        )


def need_fractions(op: str, x: TensorType, instead: str = "") -> None:
    """UserError unless a tensor is of a dtype with fractions."""
    if not is_float(x.dtype):
        other = f", or use {instead}" if instead else ""
        raise UserError(
            f"{op} of {x}: the result is fractional, which {x.dtype} cannot represent; cast the tensor "
            f"first, e.g. with .cast('float32'){other}"
        )


def dtype_name(x: Any) -> str:
    """The dtype of a library's array."""
    return getattr(x.dtype, "name", None) or str(x.dtype)
