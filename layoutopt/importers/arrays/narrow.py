"""Whole numbers that are computed wider than JAX has them: results wrap as JAX's do."""

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import Equation
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor

WIDER = {"uint8": "int32", "int16": "int32", "uint16": "int32", "uint64": "int64", "int4": "int8"}
"""JAX's element types without an equal in the runtime, and their replacements."""
_WRAPPING = ("uint8", "int16", "uint16")
_GROWING = frozenset((
    "add", "add_any", "sub", "mul", "neg", "integer_pow", "abs", "sign", "not", "shift_left", "dot_general",
    "reduce_sum", "cumsum", "scatter-add", "scatter_add", "convert_element_type",
))  # fmt: skip
"""Primitives whose results may lie outside of their operands' range."""


def wrapped(e: Equation, made: Tensor) -> Tensor:
    """The result of an equation, in the range of its element type: a fraction outside becomes its end, as XLA
    has it on CPUs."""
    dtype = e.out.dtype
    if dtype not in _WRAPPING or e.prim not in _GROWING:
        return made
    ends = np.iinfo(dtype)
    low, high = int(ends.min), int(ends.max)
    if e.prim == "convert_element_type":
        if e.ins[0].dtype == "bool":
            return made
        if is_float(e.ins[0].dtype):
            return mtf.minimum(mtf.maximum(made, low), high)
    return mtf.mod(made - low, high - low + 1) + low
