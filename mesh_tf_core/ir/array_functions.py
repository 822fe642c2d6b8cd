"""The functions of arrays that work element by element, and those that join elements along axes: a row each.

A kernel takes a function from its library by the name in the row, unless it defines its own
(`kernels.array_kernel`, `kernels.tf_kernel`). The table also has the facts that operations and cost models
need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArrayFunction:
    """One function.

    Attributes:
      array: its name in NumPy and jax.numpy; empty: both kernels have their own.
      tensorflow: its name below `tf`; empty: that kernel has its own.
      flops: arithmetic per element (vector-math libraries' polynomial lengths where it is far from one).
      vanishes: it makes 0 of 0.
      whole: it gives whole numbers for whole numbers.
      gives_bool: its result is bool.
      flat: its derivative is 0, or there is none.
    """

    array: str = ""
    tensorflow: str = ""
    flops: float = 1
    vanishes: bool = False
    whole: bool = False
    gives_bool: bool = False
    flat: bool = False


F = ArrayFunction
UNARY: Mapping[str, ArrayFunction] = {
    "neg": F("negative", vanishes=True, whole=True),
    "abs": F("abs", vanishes=True, whole=True),
    "sign": F("sign", vanishes=True, whole=True, flat=True),
    "exp": F("exp", "exp", flops=8),
    "log": F("log", "math.log", flops=8),
    "log1p": F("log1p", "math.log1p", vanishes=True),
    "expm1": F("expm1", "math.expm1", vanishes=True),
    "sqrt": F("sqrt", "sqrt", vanishes=True),
    "rsqrt": F("", "math.rsqrt"),
    "square": F("square", vanishes=True, whole=True),
    "reciprocal": F(),
    "sin": F("sin", "sin", vanishes=True),
    "cos": F("cos", "cos"),
    "tanh": F("tanh", "tanh", flops=10, vanishes=True),
    "sigmoid": F("", "sigmoid", flops=10),
    "atan": F("arctan", "math.atan", flops=12, vanishes=True),
    "erf": F("", "math.erf", flops=12, vanishes=True),
    "erfc": F("", "math.erfc", flops=12),
    "floor": F("floor", vanishes=True, whole=True, flat=True),
    "relu": F(vanishes=True, whole=True),
    "softplus": F("", "math.softplus"),
    **dict.fromkeys(("gelu", "gelu_exact", "gelu_fast", "gelu_new"), F(flops=16)),
    "silu": F(flops=12),
    "not": F("logical_not", "logical_not", whole=True, gives_bool=True, flat=True),
    "is_finite": F("isfinite", whole=True, gives_bool=True, flat=True),
}
"""Element-wise functions of one operand, by name."""
BINARY: Mapping[str, ArrayFunction] = {
    "add": F("add", "add"),
    "sub": F("subtract", "subtract"),
    "mul": F("multiply", "multiply"),
    "div": F(),
    "max": F("maximum", "maximum"),
    "min": F("minimum", "minimum"),
    "pow": F("power", "pow", flops=12),
    "mod": F("mod", "math.floormod"),
    "floordiv": F("floor_divide", "math.floordiv"),
    "eq": F("equal", "equal", gives_bool=True),
    "ne": F("not_equal", "not_equal", gives_bool=True),
    "lt": F("less", "less", gives_bool=True),
    "le": F("less_equal", "less_equal", gives_bool=True),
    "gt": F("greater", "greater", gives_bool=True),
    "ge": F("greater_equal", "greater_equal", gives_bool=True),
    "and": F("logical_and", "logical_and", gives_bool=True),
    "or": F("logical_or", "logical_or", gives_bool=True),
    "bit_xor": F("bitwise_xor", "bitwise.bitwise_xor"),
    "bit_and": F("bitwise_and", "bitwise.bitwise_and"),
    "shift_right": F("right_shift", "bitwise.right_shift"),
}
"""Element-wise functions of two operands, by name."""
REDUCE: Mapping[str, ArrayFunction] = {
    "sum": F("sum", "reduce_sum"),
    "max": F("max", "reduce_max"),
    "min": F("min", "reduce_min"),
    "prod": F("prod", "reduce_prod"),
    "all": F("all", "reduce_all"),
    "any": F("any", "reduce_any"),
}
"""Along axes, which disappear."""
