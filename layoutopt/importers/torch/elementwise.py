"""ATen's element-wise operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from layoutopt.importers.arrays.contract import FLAT, CapturedArray, Equation, Operand, Var
from layoutopt.importers.torch.calls import FLOATS
from layoutopt.importers.torch.emitter import Equations, Scalar
from mesh_tf_core.tables import pairs


@dataclass(frozen=True)
class Type:
    """The shape and element type of a result."""

    shape: tuple[int, ...]
    dtype: str


AtenRule = Callable[..., Any]
"""rule(emitter, type of the result or a list of them, arguments ...) -> the result or a list of them."""
_ALIKE = "neg exp exp2 log log1p expm1 rsqrt sqrt square cos sin tan acos asin atan tanh erf floor ceil sign"
_UNARY = {n: n for n in _ALIKE.split()} | {"sigmoid": "logistic", "bitwise_not": "not"}
_CALLED = (
    "maximum:max minimum:min true_divide:div bitwise_and:and bitwise_or:or logical_and:and logical_or:or "
    "__and__:and __or__:or logical_xor:xor bitwise_xor:xor fmod:rem"
)
_BINARY = {n: n for n in ("add", "sub", "mul", "div", "pow", "atan2")} | pairs(_CALLED)
TABLE: dict[str, AtenRule] = {}


def rule(*names: str) -> Callable[[AtenRule], AtenRule]:
    """Registers a rule under the names of ATen's operations."""

    def register(function: AtenRule) -> AtenRule:
        TABLE.update(dict.fromkeys(names, function))
        return function

    return register


def formulas(rules: Mapping[str, AtenRule]) -> None:
    """Registers rules of one expression; a key has the names of several operations."""
    TABLE.update((name, written) for names, written in rules.items() for name in names.split())


def dims_of(dim: Any, rank: int) -> list[int]:
    """The axes that an argument `dim` means; all of them if it is None or empty."""
    if dim in (None, [], ()):
        return list(range(rank))
    return [d % rank for d in (dim if isinstance(dim, list | tuple) else [dim])]


def _unary(prim: str) -> AtenRule:
    return lambda m, v, x: m.unary(prim, x if prim == "not" else m.cast(x, v.dtype))


def _binary(prim: str) -> AtenRule:
    def write(
        m: Equations, v: Type, a: Scalar, b: Scalar, alpha: float = 1, rounding_mode: Any = None
    ) -> Operand:
        if alpha != 1:
            b = m.binary("mul", b, alpha, v.dtype)
        if rounding_mode is not None:
            return _divided(m, v, a, b, rounding_mode)
        return m.binary(prim, a, b, v.dtype)

    return write


def _divided(m: Equations, v: Type, a: Scalar, b: Scalar, rounding: str) -> Operand:
    """a / b, rounded down ("floor"), or towards 0 ("trunc") as whole numbers are by themselves."""
    found = m.binary("div", a, b, v.dtype)
    if v.dtype in FLOATS:
        return m.unary("floor", found) if rounding == "floor" else _towards_zero(m, found)
    if rounding == "trunc":
        return found
    rest = m.binary("sub", a, m.binary("mul", found, b, v.dtype), v.dtype)
    apart = m.binary("lt", m.binary("mul", rest, b, v.dtype), 0, v.dtype, "bool")
    return m.binary("sub", found, m.cast(apart, v.dtype), v.dtype)


def _towards_zero(m: Equations, x: Operand) -> Operand:
    under = m.binary("lt", x, 0, x.dtype, "bool")
    return m.select(under, m.unary("ceil", x), m.unary("floor", x), x.dtype)


def _but_nan(m: Equations, v: Type, a: Operand, b: Operand, prim: str) -> Operand:
    """The extreme of two numbers; of one number and nan, the number."""
    a, b = m.cast(a, v.dtype), m.cast(b, v.dtype)
    isnan = [m.binary("ne", x, x, v.dtype, "bool") for x in (a, b)]
    found = m.select(isnan[1], a, m.binary(prim, a, b, v.dtype), v.dtype)
    return m.select(isnan[0], b, found, v.dtype)


def wider(*given: Scalar) -> str:
    """The element type in which operands are compared; a number takes that of the arrays."""
    dtypes = [x.dtype for x in given if isinstance(x, Var | CapturedArray)]
    order = ("bool", "uint8", "int8", "int16", "int32", "bfloat16", "float16", "float32", "float64")
    found = max(dtypes, key=order.index)
    fraction = any(isinstance(x, float) and not x.is_integer() for x in given)
    return "float32" if fraction and found not in FLOATS else found


TABLE |= {name: _unary(prim) for name, prim in _UNARY.items()}
TABLE |= {name: _binary(prim) for name, prim in _BINARY.items()}
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    TABLE[_name] = lambda m, v, a, b, prim=_name: m.binary(prim, a, b, wider(a, b), "bool")
formulas(
    {
        "floor_divide": lambda m, v, a, b: _divided(m, v, a, b, "floor"),
        "logical_not": lambda m, v, x: m.binary("eq", x, 0, x.dtype, "bool"),
        "reciprocal": lambda m, v, x: m.binary("div", 1, x, v.dtype),
        "silu": lambda m, v, x: m.binary("mul", x, m.unary("logistic", x), x.dtype),
        "broadcast_tensors": lambda m, v, xs: [m.expand(x, t.shape) for x, t in zip(xs, v, strict=True)],
        "abs": lambda m, v, x: m.unary("abs", x, **{FLAT: True}),
        "relu": lambda m, v, x: m.clamped(x, 0, None, x.dtype, FLAT),
        "relu6": lambda m, v, x: m.clamped(x, 0, 6, x.dtype, FLAT),
        "hardtanh": lambda m, v, x, min_val=-1, max_val=1: m.clamped(x, min_val, max_val, x.dtype, FLAT),
        "hardsigmoid": lambda m, v, x: m.binary(
            "mul", TABLE["relu6"](m, v, m.binary("add", x, 3, x.dtype)), 1 / 6, x.dtype
        ),
        "hardswish": lambda m, v, x: m.binary("mul", x, TABLE["hardsigmoid"](m, v, x), x.dtype),
        "log_sigmoid": lambda m, v, x: m.unary("neg", softplus(m, v, m.unary("neg", x))),
        "log_sigmoid_forward": lambda m, v, x: [TABLE["log_sigmoid"](m, v[0], x), None],
        "to _to_copy type_as float": lambda m, v, x, *how, **more: m.cast(x, v.dtype),
        "contiguous clone alias detach_ lift_fresh_copy lift_fresh": lambda m, v, x, *how, **more: x,
        "detach": lambda m, v, x: m.unary("stop_gradient", x),
        "where": lambda m, v, where, yes, no: m.select(where, yes, no, v.dtype),
        "masked_fill": lambda m, v, x, mask, value: m.select(mask, value, x, v.dtype),
        "clamp clip": lambda m, v, x, min=None, max=None: m.clamped(x, min, max, v.dtype),
        "clamp_min": lambda m, v, x, min: m.clamped(x, min, None, v.dtype),
        "clamp_max": lambda m, v, x, max: m.clamped(x, None, max, v.dtype),
        "round": lambda m, v, x: m.unary("round", x, rounding_method="TO_NEAREST_EVEN"),
        "fmax": lambda m, v, a, b: _but_nan(m, v, a, b, "max"),
        "fmin": lambda m, v, a, b: _but_nan(m, v, a, b, "min"),
        "trunc fix": lambda m, v, x: _towards_zero(m, x) if v.dtype in FLOATS else x,
        "frac": lambda m, v, x: m.binary("sub", x, _towards_zero(m, x), v.dtype),
        "isfinite": lambda m, v, x: m.emit("is_finite", [x], x.shape, "bool"),
        "log2": lambda m, v, x: m.binary("mul", m.unary("log", m.cast(x, v.dtype)), 1 / math.log(2), v.dtype),
    }
)


@rule("gelu")
def _gelu(m: Equations, v: Type, x: Operand, approximate: str = "none") -> Operand:
    if approximate == "tanh":
        cube = m.binary("mul", m.binary("mul", x, x, v.dtype), x, v.dtype)
        inner = m.binary("add", x, m.binary("mul", cube, 0.044715, v.dtype), v.dtype)
        part = m.unary("tanh", m.binary("mul", inner, math.sqrt(2 / math.pi), v.dtype))
    else:
        part = m.unary("erf", m.binary("mul", x, math.sqrt(0.5), v.dtype))
    half = m.binary("mul", x, 0.5, v.dtype)
    return m.binary("mul", half, m.binary("add", part, 1, v.dtype), v.dtype)


@rule("mul")
def _mul(m: Equations, v: Type, a: Scalar, b: Scalar) -> Operand:
    for x, scale in ((a, b), (b, a)):
        found = _root_mean_square(m, x, scale)
        if found is not None and found.dtype == v.dtype:
            return found
    return m.binary("mul", a, b, v.dtype)


def _root_mean_square(m: Equations, x: Scalar, scale: Scalar) -> Operand | None:
    """x normalized, where scale is rsqrt(mean(x²) + epsilon) of its last axis: RMSNorm as it is written."""
    if not isinstance(x, Var) or not isinstance(scale, Var) or (e := m.maker(scale, "rsqrt")) is None:
        return None
    if (e := m.maker(e.ins[0], "add")) is None or not isinstance(e.ins[1], CapturedArray):
        return None
    epsilon = e.ins[1]
    if (e := m.maker(e.ins[0], "mul")) is None or not isinstance(e.ins[1], CapturedArray):
        return None
    count = e.ins[1]
    e = m.maker(e.ins[0], "broadcast_in_dim")
    e = e and m.maker(e.ins[0], "reduce_sum")
    if e is None or e.params["axes"] != (len(x.shape) - 1,):
        return None
    square: Equation | None = m.maker(e.ins[0], "integer_pow")
    if square is None or square.ins[0] is not x or square.params["y"] != 2:
        return None
    if epsilon.shape or count.shape or abs(float(count.value) * x.shape[-1] - 1) > 1e-5:
        return None
    return m.unary("normalize", x, epsilon=float(epsilon.value), center=False)


@rule("remainder")
def _remainder(m: Equations, v: Type, a: Scalar, b: Scalar) -> Operand:
    rest = m.binary("rem", a, b, v.dtype)
    under = m.binary("lt", m.binary("mul", rest, b, v.dtype), 0, v.dtype, "bool")
    return m.select(under, m.binary("add", rest, b, v.dtype), rest, v.dtype)


@rule("pow")
def _pow(m: Equations, v: Type, x: Scalar, e: Scalar) -> Operand:
    if isinstance(x, Var | CapturedArray) and isinstance(e, int | float) and float(e).is_integer():
        return m.unary("integer_pow", m.cast(x, v.dtype), y=int(e))
    if e == 0.5 and isinstance(x, Var):
        return m.unary("sqrt", m.cast(x, v.dtype))
    return m.binary("pow", x, e, v.dtype)


@rule("softplus")
def softplus(m: Equations, v: Type, x: Operand, beta: float = 1, threshold: float = 20) -> Operand:
    """log(1 + exp(beta x)) / beta, and x where that is the same; its slope at 0 is a half."""
    z = m.binary("mul", x, beta, x.dtype)
    near = m.unary("log1p", m.unary("exp", m.clamped(z, None, threshold, x.dtype)))
    far = m.binary("gt", z, threshold, x.dtype, "bool")
    return m.select(far, x, m.binary("mul", near, 1 / beta, x.dtype), x.dtype)


@rule("feature_dropout")
def _channel_dropout(m: Equations, v: Type, x: Operand, rate: float, train: bool = True) -> Operand:
    return m.dropout(x, rate, (*x.shape[:2], *(1 for _ in x.shape[2:]))) if train else x


@rule("dropout", "native_dropout")
def _dropout(m: Equations, v: Any, x: Operand, rate: float, train: bool = True) -> Any:
    found = x
    if train and rate:
        found = m.dropout(x, rate) if rate < 1 else m.binary("mul", x, 0, x.dtype)
    return [found, None] if isinstance(v, list) else found


ELEMENTWISE = frozenset(TABLE)
"""The operations above: other modules add to the table."""
