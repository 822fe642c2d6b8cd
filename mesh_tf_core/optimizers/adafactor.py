"""Adafactor (Shazeer & Stern 2018, algorithm 4), with optional momentum of the steps."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.math import exp, maximum, rsqrt, sqrt, square
from mesh_tf_core.ops.reduce import reduce_mean
from mesh_tf_core.ops.unary import unary
from mesh_tf_core.optimizers.base import LearningRate, Optimizer, Updates, slot, times
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern 2018): stores the second moment of a matrix as one row and one column.

    Dimensions that count layers are not factored.

    Attributes:
      decay_exponent: beta2 at step t is 1 - t^-decay_exponent.
      clipping: limit of the root mean square of an update.
      scale_parameter: the step is relative to the parameter's own root mean square (at least `epsilon2`).
      min_dim: smaller dimensions are not factored.
      beta1: decay of a running mean of the steps; 0 stores no mean (section 7 of the paper: momentum costs as
        much memory as the parameters).
    """

    decay_exponent: float = 0.8
    clipping: float = 1.0
    scale_parameter: bool = True
    epsilon1: float = 1e-30
    epsilon2: float = 1e-3
    min_dim: int = 128
    beta1: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta1 < 1:
            raise UserError(f"Adafactor: beta1 must be at least 0 and less than 1, found {self.beta1}")

    def update(self, graph: Graph, variable: Variable, gradient: Tensor, rate: LearningRate) -> Updates:
        g = gradient.cast("float32")
        t = (graph.step() + 1).cast("float32")
        decay = 1.0 - exp(unary("log", t) * (-self.decay_exponent))
        g2 = square(g) + self.epsilon1
        root, states = self._inverse_root(graph, variable, g2, decay)
        yield from states
        scaled = g * root
        own = [d.name for d in variable.shape.dims[variable.stacked :]]
        scaled = scaled / maximum(sqrt(reduce_mean(square(scaled), own)) * (1.0 / self.clipping), 1.0)
        master = graph.read(variable).cast("float32")
        if self.scale_parameter:
            scaled = scaled * maximum(sqrt(reduce_mean(square(master), own)), self.epsilon2)
        step = times(scaled, rate)
        if self.beta1:
            state, old = slot(graph, variable, "adafactor_m", variable.shape)
            step = old * self.beta1 + step * (1.0 - self.beta1)
            yield state, step
        yield variable, (master - step).cast(variable.dtype)

    def _inverse_root(
        self, graph: Graph, variable: Variable, g2: Tensor, decay: Tensor
    ) -> tuple[Tensor, Updates]:
        """1 / root of the second moment, and the states to store."""
        own = variable.shape.dims[variable.stacked :]
        large = sorted(own, key=lambda d: -d.size)[:2]
        if len(large) < 2 or large[1].size < self.min_dim:
            state, old = slot(graph, variable, "adafactor_v", variable.shape)
            new = old * decay + g2 * (1.0 - decay)
            return rsqrt(new), [(state, new)]
        row_dim, column_dim = large
        row_state, row = slot(graph, variable, "adafactor_row", variable.shape.without(column_dim.name))
        column_state, column = slot(graph, variable, "adafactor_column", variable.shape.without(row_dim.name))
        row = row * decay + reduce_mean(g2, column_dim) * (1.0 - decay)
        column = column * decay + reduce_mean(g2, row_dim) * (1.0 - decay)
        root = rsqrt(row / reduce_mean(row, row_dim)) * rsqrt(column)
        return root, [(row_state, row), (column_state, column)]
