"""What several operations share: alignment by name, checks, roles of element-wise work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Shape, union
from mesh_tf_core.ir.dtypes import promote
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
