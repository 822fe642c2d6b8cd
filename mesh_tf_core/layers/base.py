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
from mesh_tf_core.ops.basic import stop_gradient
from mesh_tf_core.ops.custom import custom_gradient
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.float8 import float8_einsum, in_eight_bits
from mesh_tf_core.ops.float8_recipes import RECIPES
from mesh_tf_core.ops.unary import unary
from mesh_tf_core.tracing.gradients import gradients_inside


def _clamped_swish(x: Tensor) -> Tensor:
    y = piecewise.clip(x, high=7.0)
    return y * functions.sigmoid(y * 1.702)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped_one": lambda x: piecewise.clip(x, -7.0, 7.0) + 1.0,
    "clamped_swish": _clamped_swish,
    "elu": piecewise.elu,
    "gelu": functions.gelu,
    "gelu_exact": lambda x: functions.gelu(x, exact=True),
    "gelu_fast": lambda x: unary("gelu_fast", x),
    "gelu_new": lambda x: unary("gelu_new", x),
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


def weighted(
    x: Tensor, w: Tensor, output: Shape | Sequence[Dim], needed: float = 1.0, again: Tensor | None = None
) -> Tensor:
    """x times a layer's weight, by the float8 recipe of the graph if it has one; `needed`: as of `einsum`;
    `again`: x as its backward has it (`gated`)."""
    recipe = x.graph.in_float8
    if recipe:
        return float8_einsum([x, w], output, needed, recipe, again)
    return einsum([x, w], output, needed=needed)


def gated(
    unit: Callable[..., Tensor], xs: Sequence[Tensor], dim: str, others: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor | None]:
    """unit(*xs, *others), the input of a product, and, where a float8 recipe keeps the inputs of gated units
    in eight bits, the same made of these: backward computes it and its gradients anew (DeepSeek-AI 2024,
    "DeepSeek-V3", section 3.3.3).

    Args:
      xs: kept in eight bits, with scales along `dim`.
    """
    graph, recipe = xs[0].graph, xs[0].graph.in_float8
    if len(xs) < 2 or not recipe or not RECIPES[recipe].gates:
        return unit(*xs, *others), None
    with graph.scope("gate"):
        near = [*(in_eight_bits(x, dim, recipe) for x in xs), *map(stop_gradient, others)]
        again = unit(*near)

    def backward(dys: list[Tensor | None], *_: list[Tensor]) -> list[Tensor | None]:
        (dy,) = dys
        assert dy is not None  # else nothing would ask
        return gradients_inside(again, dy, near)

    out: Tensor = custom_gradient(unit, backward, [*xs, *others])  # type: ignore[assignment]
    return out, again


def project(
    x: Tensor,
    name: str,
    reduced: Sequence[Dim],
    outputs: Sequence[Dim],
    bias: bool = False,
    again: Tensor | None = None,
) -> Tensor:
    """x times a new weight [reduced, outputs], of standard deviation 1 / sqrt(size of reduced); with `bias`,
    plus a new one [outputs], at first 0; `again` as of `weighted`."""
    fan_in = Shape(reduced).size
    w = x.graph.variable(name, [*reduced, *outputs], Normal(1 / math.sqrt(fan_in)), activation_dtype=x.dtype)
    kept = [d for d in x.shape if d not in reduced]
    y = weighted(x, w, [*kept, *outputs], again=again)
    return y + x.graph.variable(f"{name}_bias", outputs, ZEROS, activation_dtype=x.dtype) if bias else y
