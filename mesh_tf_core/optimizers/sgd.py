"""Stochastic gradient descent, with momentum (Sutskever et al. 2013)."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.graph import Graph
from mesh_tf_core.optimizers.base import Optimizer, slot
from mesh_tf_core.structure import Variable
from mesh_tf_core.tensor import Tensor


@dataclass(frozen=True)
class SGD(Optimizer):
    """w -= learning_rate * v, v = momentum * v + gradient."""

    momentum: float = 0.0

    def update(self, graph: Graph, variable: Variable, gradient: Tensor) -> None:
        step = gradient
        if self.momentum:
            state, old = slot(graph, variable, "momentum", variable.shape)
            new = old * self.momentum + gradient.cast("float32")
            graph.assign(state, new)
            step = new.cast(variable.dtype)
        graph.assign(variable, graph.read(variable) - step * self.learning_rate)
