"""The named element-wise functions of the public surface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_tf_core.ops.binary import binary
from mesh_tf_core.ops.unary import unary

if TYPE_CHECKING:
    from mesh_tf_core.tensor import Tensor


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


def gelu(x: Tensor) -> Tensor:
    """Gaussian error linear unit, tanh form (Hendrycks & Gimpel 2016)."""
    return unary("gelu", x)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), also called swish."""
    return unary("silu", x)


def maximum(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The larger of two, element by element."""
    return binary("max", x, y)


def minimum(x: Tensor | float, y: Tensor | float) -> Tensor:
    """The smaller of two, element by element."""
    return binary("min", x, y)
