"""The named element-wise functions of the public surface, a line for each of `ir.kernel`."""

from __future__ import annotations

from typing import Any, Protocol

from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import binary
from mesh_tf_core.ops.unary import unary


class _OfOne(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


class _OfTwo(Protocol):
    def __call__(self, x: Tensor | float, y: Tensor | float) -> Tensor: ...


def _named(function: Any, name: str, doc: str) -> Any:
    """The function as if it were written under its name, for `help` and tracebacks."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _of_one(name: str, doc: str, fn: str = "") -> _OfOne:
    def function(x: Tensor) -> Tensor:
        return unary(fn or name, x)

    return _named(function, name, doc)


def _of_two(name: str, doc: str, fn: str = "") -> _OfTwo:
    def function(x: Tensor | float, y: Tensor | float) -> Tensor:
        return binary(fn or name, x, y)

    return _named(function, name, doc)


exp = _of_one("exp", "e to the power x.")
log = _of_one("log", "Natural logarithm.")
sqrt = _of_one("sqrt", "Square root.")
rsqrt = _of_one("rsqrt", "1 / sqrt(x).")
square = _of_one("square", "x * x.")
tanh = _of_one("tanh", "Hyperbolic tangent.")
sigmoid = _of_one("sigmoid", "1 / (1 + exp(-x)).")
relu = _of_one("relu", "max(x, 0).")
silu = _of_one("silu", "x * sigmoid(x), also called swish.")
maximum = _of_two("maximum", "The larger of two, element by element.", "max")
minimum = _of_two("minimum", "The smaller of two, element by element.", "min")
abs = _of_one("abs", "Absolute value.")
sign = _of_one("sign", "-1, 0 or 1.")
sin = _of_one("sin", "Sine.")
cos = _of_one("cos", "Cosine.")
log1p = _of_one("log1p", "log(1 + x), exact for small x.")
expm1 = _of_one("expm1", "exp(x) - 1, exact for small x.")
atan = _of_one("atan", "The angle, between -pi/2 and pi/2, whose tangent is x.")
erf = _of_one("erf", "Error function.")
erfc = _of_one("erfc", "Complementary error function, 1 - erf(x), exact for large x.")
floor = _of_one("floor", "Largest whole number that is not above x.")
reciprocal = _of_one("reciprocal", "1 / x.")
softplus = _of_one("softplus", "log(1 + exp(x)).")
is_finite = _of_one("is_finite", "True where x is finite: neither infinite nor NaN.")
logical_not = _of_one("logical_not", "True where x is False.", "not")
add = _of_two("add", "x + y, broadcast by name.")
subtract = _of_two("subtract", "x - y, broadcast by name.", "sub")
multiply = _of_two("multiply", "x * y, broadcast by name.", "mul")
divide = _of_two("divide", "x / y, broadcast by name.", "div")
pow = _of_two("pow", "x to the power y.")
mod = _of_two("mod", "x - floor(x / y) * y, with the sign of y.")
floordiv = _of_two("floordiv", "floor(x / y).")
equal = _of_two("equal", "True where x and y are equal.", "eq")
not_equal = _of_two("not_equal", "True where x and y differ.", "ne")
less = _of_two("less", "True where x < y.", "lt")
less_equal = _of_two("less_equal", "True where x <= y.", "le")
greater = _of_two("greater", "True where x > y.", "gt")
greater_equal = _of_two("greater_equal", "True where x >= y.", "ge")
logical_and = _of_two("logical_and", "True where both hold.", "and")
logical_or = _of_two("logical_or", "True where at least one of two holds.", "or")


def gelu(x: Tensor, exact: bool = False) -> Tensor:
    """Gaussian error linear unit (Hendrycks & Gimpel 2016): the tanh form, or with `exact` x times the
    normal distribution function, as in BERT and ViT.
    """
    return unary("gelu_exact" if exact else "gelu", x)


def negative(x: Tensor) -> Tensor:
    """-x."""
    return -x


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x), under the name of Ramachandran et al. 2017."""
    return silu(x)
