"""Convolutions along a text with few taps, which many features share."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import check_rate, project
from mesh_tf_core.ops.basic import add_n
from mesh_tf_core.ops.math import sigmoid
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.random import dropout
from mesh_tf_core.ops.shape import rename
from mesh_tf_core.ops.softmax import softmax
from mesh_tf_core.ops.stacking import unstack


@dataclass(frozen=True)
class LightConv:
    """A gated projection, a convolution along the length, and a projection (Wu et al. 2019, "Pay less
    attention with lightweight and dynamic convolutions", sections 3 and 4).

    The features are cut into heads, and all features of a head share their taps, which are a softmax over
    `size` positions. A split length stays split: neighbours exchange their borders.

    Attributes:
      heads: number of groups of features; a divisor of the number of features.
      size: taps.
      dynamic: the taps of every position are made from it; else they are learned.
      causal: a position sees itself and those before it; else as many on both sides.
      dropout: rate on the taps after their softmax ("DropConnect").
    """

    heads: Dim
    size: int
    dynamic: bool = False
    causal: bool = False
    dropout: float = 0.0
    length: str = "length"
    d_model: str = "d_model"
    name: str = "light_conv"

    def __post_init__(self) -> None:
        check_rate(self, self.dropout)
        if self.size < 1:
            raise UserError(f"LightConv: size must be positive, found {self.size}")

    def __call__(self, x: Tensor) -> Tensor:
        """[others, length, d_model] -> the same."""
        d, h = x.dim(self.d_model), self.heads
        if d.size % h.size:
            raise UserError(
                f"LightConv: the number of heads, {h.size}, must divide the size of {d.name!r}, {d.size}"
            )
        parts = [h, Dim("d_head", d.size // h.size)]
        with x.graph.scope(self.name):
            y = project(x, "wi", [d], parts) * sigmoid(project(x, "wg", [d], parts))
            taps = dropout(softmax(self._taps(y, parts), "taps"), self.dropout)
            before = self.size - 1 if self.causal else (self.size - 1) // 2
            seen = [shift(y, before - j, self.length) * tap for j, tap in enumerate(unstack(taps, "taps"))]
            return project(add_n(seen), "wo", parts, [d])

    def _taps(self, y: Tensor, parts: list[Dim]) -> Tensor:
        """Logits of the taps: [heads, taps], or [others, length, heads, taps]."""
        h, taps = self.heads, Dim("taps", self.size)
        if not self.dynamic:
            return y.graph.variable("taps", [h, taps], Normal(1.0), activation_dtype=y.dtype)
        inner = Dim(f"{h.name}_in", h.size)
        return project(rename(y, **{h.name: inner.name}), "taps", [inner, *parts[1:]], [h, taps])
