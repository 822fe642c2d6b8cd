"""Stochastic gradient descent, with momentum (Sutskever et al. 2013)."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.optimizers.base import LearningRate, Optimizer, Updates, slot, times
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class SGD(Optimizer):
    """w -= learning_rate * v, v = momentum * v + gradient."""

    momentum: float = 0.0

    def update(self, graph: Graph, variable: Variable, gradient: Tensor, rate: LearningRate) -> Updates:
        step = gradient
        if self.momentum:
            state, old = slot(graph, variable, "momentum", variable.shape)
            new = old * self.momentum + gradient.cast("float32")
            yield state, new
            step = new.cast(variable.dtype)
        yield variable, graph.read(variable) - times(step, rate)
