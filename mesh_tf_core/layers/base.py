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

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped_one": lambda x: piecewise.clip(x, -7.0, 7.0) + 1.0,
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
BOUNDS = (" below ", " within ")


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation function called `name`; "silu below 7" is silu(min(x, 7)), "silu within 7" is silu(x) at
    most 7 and at least -7."""
    own, word, bound = next((part for w in BOUNDS if (part := name.partition(w))[1]), (name, "", ""))
    if own not in ACTIVATIONS:
        raise UserError(f"unknown activation {own!r}; {known_names(own, ACTIVATIONS)}")
    f, most = ACTIVATIONS[own], float(bound or 0)
    if word == " below ":
        return lambda x: f(piecewise.clip(x, high=most))
    return (lambda x: piecewise.clip(f(x), -most, most)) if word else f


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
        return gradients_inside([again], dys, near)

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
