"""Code that layers share: weights in the activations' dtype, activation functions by name, checks of
fields."""

import math
from collections.abc import Callable, Sequence

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops import activations as piecewise
from mesh_tf_core.ops import math as functions
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.float8 import float8_einsum


def _clamped_swish(x: Tensor) -> Tensor:
    y = piecewise.clip(x, high=7.0)
    return y * functions.sigmoid(y * 1.702)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped_one": lambda x: piecewise.clip(x, -7.0, 7.0) + 1.0,
    "clamped_swish": _clamped_swish,
    "elu": piecewise.elu,
    "gelu": functions.gelu,
    "gelu_exact": lambda x: functions.gelu(x, exact=True),
    "leaky_relu": piecewise.leaky_relu,
    "linear": lambda x: x,
    "quick_gelu": lambda x: x * functions.sigmoid(x * 1.702),
    "relu": functions.relu,
    "relu_squared": lambda x: functions.square(functions.relu(x)),
    "selu": piecewise.selu,
    "sigmoid": functions.sigmoid,
    "silu": functions.silu,
    "softplus": functions.softplus,
    "tanh": functions.tanh,
}
"""Activation functions that layers take by name."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function called `name`."""
    if name not in ACTIVATIONS:
        raise UserError(f"unknown activation {name!r}; {known_names(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def check_rate(layer: object, rate: float) -> None:
    """UserError unless a dropout rate is one."""
    if not 0 <= rate < 1:
        raise UserError(f"{type(layer).__name__}: dropout must be at least 0 and less than 1, found {rate}")


def weighted(x: Tensor, w: Tensor, output: Shape | Sequence[Dim], needed: float = 1.0) -> Tensor:
    """x times a layer's weight, by the float8 recipe of the graph if it has one; `needed`: as of `einsum`."""
    recipe = x.graph.in_float8
    if recipe:
        return float8_einsum([x, w], output, needed, recipe)
    return einsum([x, w], output, needed=needed)


def project(
    x: Tensor, name: str, reduced: Sequence[Dim], outputs: Sequence[Dim], bias: bool = False
) -> Tensor:
    """x times a new weight [reduced, outputs], of standard deviation 1 / sqrt(size of reduced); with `bias`,
    plus a new one [outputs], at first 0."""
    fan_in = Shape(reduced).size
    w = x.graph.variable(name, [*reduced, *outputs], Normal(1 / math.sqrt(fan_in)), activation_dtype=x.dtype)
    kept = [d for d in x.shape if d not in reduced]
    y = weighted(x, w, [*kept, *outputs])
    return y + x.graph.variable(f"{name}_bias", outputs, ZEROS, activation_dtype=x.dtype) if bias else y
