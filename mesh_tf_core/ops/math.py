"""The named element-wise functions of the public surface."""

from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import binary
from mesh_tf_core.ops.unary import unary


def exp(x: Tensor) -> Tensor:
    """e to the power x."""
    return unary("exp", x)


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    return unary("log", x)


def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    return unary("sqrt", x)


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return unary("rsqrt", x)


def square(x: Tensor) -> Tensor:
    """x * x."""
    return unary("square", x)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    return unary("tanh", x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return unary("sigmoid", x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return unary("relu", x)


def gelu(x: Tensor, exact: bool = False) -> Tensor:
    """Gaussian error linear unit (Hendrycks & Gimpel 2016): the tanh form, or with `exact` x times the
    normal distribution function, as in BERT and ViT.
    """
    return unary("gelu_exact" if exact else "gelu", x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), also called swish."""
    return unary("silu", x)


def maximum(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The larger of two, element by element."""
    return binary("max", x, y)


def minimum(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The smaller of two, element by element."""
    return binary("min", x, y)


def abs(x: Tensor) -> Tensor:
    """Absolute value."""
    return unary("abs", x)


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1."""
    return unary("sign", x)


def sin(x: Tensor) -> Tensor:
    """Sine."""
    return unary("sin", x)


def cos(x: Tensor) -> Tensor:
    """Cosine."""
    return unary("cos", x)


def log1p(x: Tensor) -> Tensor:
    """log(1 + x), exact for small x."""
    return unary("log1p", x)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1, exact for small x."""
    return unary("expm1", x)


def atan(x: Tensor) -> Tensor:
    """The angle, between -pi/2 and pi/2, whose tangent is x."""
    return unary("atan", x)


def erf(x: Tensor) -> Tensor:
    """Error function."""
    return unary("erf", x)


def erfc(x: Tensor) -> Tensor:
    """Complementary error function, 1 - erf(x), exact for large x."""
    return unary("erfc", x)


def floor(x: Tensor) -> Tensor:
    """Largest whole number that is not above x."""
    return unary("floor", x)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x."""
    return unary("reciprocal", x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return unary("softplus", x)


def is_finite(x: Tensor) -> Tensor:
    """True where x is finite: neither infinite nor NaN."""
    return unary("is_finite", x)


def logical_not(x: Tensor) -> Tensor:
    """True where x is False."""
    return unary("not", x)


def negative(x: Tensor) -> Tensor:
    """-x."""
    return -x


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x), under the name of Ramachandran et al. 2017."""
    return silu(x)


def add(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x + y, broadcast by name."""
    return binary("add", x, y)


def subtract(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x - y, broadcast by name."""
    return binary("sub", x, y)


def multiply(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x * y, broadcast by name."""
    return binary("mul", x, y)


def divide(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x / y, broadcast by name."""
    return binary("div", x, y)


def pow(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x to the power y."""
    return binary("pow", x, y)


def mod(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x - floor(x / y) * y, with the sign of y."""
    return binary("mod", x, y)


def floordiv(x: Tensor | float, y: Tensor | float) -> Tensor:
    """floor(x / y)."""
    return binary("floordiv", x, y)


def equal(x: Tensor | float, y: Tensor | float) -> Tensor:
    """True where x and y are equal."""
    return binary("eq", x, y)


def not_equal(x: Tensor | float, y: Tensor | float) -> Tensor:
    """True where x and y differ."""
    return binary("ne", x, y)


def less(x: Tensor | float, y: Tensor | float) -> Tensor:
    """True where x < y."""
    return binary("lt", x, y)


def less_equal(x: Tensor | float, y: Tensor | float) -> Tensor:
    """True where x <= y."""
    return binary("le", x, y)


def greater(x: Tensor | float, y: Tensor | float) -> Tensor:
    """True where x > y."""
    return binary("gt", x, y)


def greater_equal(x: Tensor | float, y: Tensor | float) -> Tensor:
    """True where x >= y."""
    return binary("ge", x, y)


def logical_and(x: Tensor | float, y: Tensor | float) -> Tensor:
    """True where both hold."""
    return binary("and", x, y)


def logical_or(x: Tensor | float, y: Tensor | float) -> Tensor:
    """True where at least one of two holds."""
    return binary("or", x, y)
