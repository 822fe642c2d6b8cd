"""The selective state space of Mamba (Gu & Dao 2023, "Mamba", algorithm 2): h = e^(dt a) h + dt x b,
y = h c + D x. Every channel decays at rates of its own, so no chunk is a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ONES
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import project
from mesh_tf_core.layers.recurrent import Recurrence, dt_bias, made_by, short_conv
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.math import exp, silu, softplus
from mesh_tf_core.ops.shape import transpose
from mesh_tf_core.tracing.scan import scan


@dataclass(frozen=True)
class SelectiveStateSpace(Recurrence):
    """A layer of Mamba.

    Attributes:
      inner, d_state: channels, and elements of the state of each.
      rank: of the map to steps dt.
      taps: positions of the short convolution; bias, conv_bias: of projections, and of the convolution.
      norms: of dt, b and c: norm(tensor, name, dimension); None: they have none.
      chunk: for `Recurrence` alone.
    """

    inner: Dim
    d_state: Dim
    rank: int
    taps: int = 4
    bias: bool = False
    conv_bias: bool = True
    norms: Callable[[Tensor, str, str], Tensor] | None = None
    chunk: int = 1
    d_model: str = "d_model"
    name: str = "mamba"

    def __call__(self, u: Tensor) -> Tensor:
        """[batch, length, d_model] -> the same."""
        g, d, inner, rank = u.graph, u.dim(self.d_model), self.inner, Dim("dt_rank", self.rank)
        with g.scope(self.name):
            gate, x = (project(u, name, [d], [inner], self.bias) for name in ("gate", "x"))
            x = short_conv(x, "x_conv", self.taps, self.conv_bias)
            parts = {"dt_down": rank, "b": self.d_state, "c": self.d_state}
            low, b, c = (project(x, name, [inner], [dim]) for name, dim in parts.items())
            if self.norms is not None:
                names = ((f"{name}_norm", dim.name) for name, dim in parts.items())
                low, b, c = (self.norms(t, *n) for t, n in zip((low, b, c), names, strict=True))
            dt = project(low, "dt", [rank], [inner]).cast("float32")
            dt = softplus(dt + g.variable("step_bias", [inner], dt_bias))
            rate = -exp(g.variable("log_a", [inner, self.d_state], _log_a))
            y = made_by(self, selective, ("selective", self.d_state.size, inner, 1), x, dt, rate, b, c)
            y = y + x * g.variable("skip", [inner], ONES, activation_dtype=x.dtype)
            return project(y * silu(gate), "out", [inner], [d], self.bias)


def selective(x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, chunk: int = 1) -> Tensor:
    """y_t = h_t c_t, with h_t = e^(dt_t rate) h_(t-1) + dt_t x_t b_t, from h = 0 on.

    Args:
      x, dt: [batch, length, inner]; rate: [inner, d_state], negative.
      b, c: [batch, length, d_state].
    """
    length, inner = x.dim("length"), rate.shape.dims[0]
    shape = [*dt.shape.without(length.name), rate.shape.dims[1]]

    def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        state = state * exp(einsum([dt, rate], shape)) + einsum([dt * x, b], shape)
        return state, (einsum([state, c], [*shape[:-2], inner]),)

    wide: list[Any] = [t.cast("float32") for t in (x, dt, b, c)]
    _, (y,) = scan(step, broadcast(constant_like(dt, 0.0), shape), length, wide)
    return transpose(y, x.shape).cast(x.dtype)


def _log_a(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Logarithms of 1, 2, 3 ... (S4D)."""
    return np.broadcast_to(np.log(np.arange(1, shape[-1] + 1)), shape)
