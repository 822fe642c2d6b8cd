"""Linear maps and feed-forward blocks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ZEROS
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import activation, check_rate, gated, project
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.random import dropout


@dataclass(frozen=True)
class Dense:
    """activation(x w + b): sums out the dimensions `reduced` of x and adds the dimensions `outputs`.

    Attributes:
      outputs: new last dimensions; x must not have them.
      reduced: names of x's dimensions to sum out, in the order of the weight's.
      bias: add a learned [outputs].
      activation: name of a function (`layers.ACTIVATIONS`).
      name: scope of its variables `weight` and `bias`.

    Example:
      >>> import mesh_tf_core as mtf
      >>> batch, d_model, d_ff = mtf.Dim("batch", 8), mtf.Dim("d_model", 4), mtf.Dim("d_ff", 16)
      >>> x = mtf.Graph("g").input("x", [batch, d_model], "float32")
      >>> print(mtf.layers.Dense((d_ff,), ("d_model",))(x).shape)
      batch:8 d_ff:16
    """

    outputs: tuple[Dim, ...]
    reduced: tuple[str, ...]
    bias: bool = False
    activation: str = "linear"
    name: str = "dense"

    def __post_init__(self) -> None:
        activation(self.activation)
        if not self.outputs or not self.reduced:
            raise UserError("Dense: `outputs` and `reduced` must each name at least one dimension")

    def __call__(self, x: Tensor) -> Tensor:
        """[others, reduced] -> [others, outputs]."""
        with x.graph.scope(self.name):
            y = project(x, "weight", [x.dim(n) for n in self.reduced], self.outputs)
            if self.bias:
                y = y + x.graph.variable("bias", self.outputs, ZEROS, activation_dtype=x.dtype)
            return activation(self.activation)(y)


@dataclass(frozen=True)
class DenseProduct:
    """Product of one `Dense` per activation: ("linear", "sigmoid") is a gated linear unit (Dauphin et al.
    2017).

    Attributes:
      outputs, reduced, bias: as of `Dense`; the factors are called `0`, `1` and so on.
    """

    outputs: tuple[Dim, ...]
    reduced: tuple[str, ...]
    activations: tuple[str, ...] = ("linear", "sigmoid")
    bias: bool = False
    name: str = "dense_product"

    def __post_init__(self) -> None:
        if not self.activations:
            raise UserError("DenseProduct: `activations` must name at least one activation")
        self._factors()

    def _factors(self) -> list[Dense]:
        return [
            Dense(self.outputs, self.reduced, self.bias, name, str(i))
            for i, name in enumerate(self.activations)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """[others, reduced] -> [others, outputs]."""
        with x.graph.scope(self.name):
            return functools.reduce(operator.mul, (factor(x) for factor in self._factors()))


def unit_einsum(xs: Sequence[Tensor], output: Shape | Sequence[Dim]) -> Tensor:
    """`einsum` divided by the root of the number of terms that are added, so that operands of variance 1 give
    a product of variance 1 (Mesh-TensorFlow's unit-scaling convention, us_einsum)."""
    kept = Shape(output)
    terms = {d for x in xs for d in x.shape if d.name not in kept.names}
    return einsum(xs, kept) * Shape(sorted(terms, key=str)).size ** -0.5


@dataclass(frozen=True)
class FeedForward:
    """Two linear maps with an activation between them (Vaswani et al. 2017, section 3.3).

    Attributes:
      d_ff: the hidden dimension.
      gated: a third matrix, activation(x a) * up(x b) (Shazeer 2020, "GLU variants improve Transformer").
      bias: adds biases to the hidden and the output.
      dropout: rate on the hidden.
      d_model: name of the dimension that it maps to itself.
    """

    d_ff: Dim
    activation: str = "relu"
    gated: bool = False
    bias: bool = False
    dropout: float = 0.0
    d_model: str = "d_model"
    name: str = "feed_forward"
    up: str = "linear"

    def __post_init__(self) -> None:
        activation(self.activation)
        check_rate(self, self.dropout)

    def __call__(self, x: Tensor) -> Tensor:
        """[others, d_model] -> [others, d_model]."""
        g, d = x.graph, x.dim(self.d_model)
        with g.scope(self.name):
            hidden = project(x, "wi", [d], [self.d_ff])
            if self.bias:
                hidden = hidden + g.variable("bi", [self.d_ff], ZEROS, activation_dtype=x.dtype)
            act, up, again = activation(self.activation), activation(self.up), None
            if not self.gated:
                hidden = act(hidden)
            elif self.dropout:  # backward reads what was dropped, which `again` lacks
                hidden = act(hidden) * up(project(x, "wg", [d], [self.d_ff]))
            else:
                parts = [hidden, project(x, "wg", [d], [self.d_ff])]
                hidden, again = gated(lambda a, b: act(a) * up(b), parts, self.d_ff.name)
            y = project(dropout(hidden, self.dropout), "wo", [self.d_ff], [d], again=again)
            return y + g.variable("bo", [d], ZEROS, activation_dtype=x.dtype) if self.bias else y
