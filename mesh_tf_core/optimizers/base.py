"""What optimizers share: slots, the learning rate, gradients in the master copy's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.dims import Dim, Shape
from mesh_tf_core.errors import UserError
from mesh_tf_core.graph import Graph
from mesh_tf_core.initializers import Constant
from mesh_tf_core.structure import Variable
from mesh_tf_core.tensor import Tensor


@dataclass(frozen=True)
class Optimizer:
    """Adds the update of every variable to a graph."""

    learning_rate: float

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise UserError(
                f"{type(self).__name__}: learning_rate must be positive, found {self.learning_rate}"
            )

    def update(self, graph: Graph, variable: Variable, gradient: Tensor) -> None:
        """Adds the operations that update one variable; the gradient has its shape and dtype."""
        raise NotImplementedError


def slot(
    graph: Graph, variable: Variable, name: str, dims: Sequence[Dim] | Shape, value: float = 0.0
) -> tuple[Variable, Tensor]:
    """A float32 state of the optimizer for one variable, and its value before the step."""
    full = f"{variable.name}/{name}"
    stacked = sum(d in variable.shape.dims[: variable.stacked] for d in dims)
    found = Variable(full, Shape(dims), "float32", Constant(value), False, stacked, variable.name)
    graph.variables[full] = found
    return found, graph.read(found)


def apply_updates(graph: Graph, optimizer: Optimizer, pairs: Sequence[tuple[Variable, Tensor]]) -> None:
    """Adds the whole update phase: one scope per variable, and the step counter."""
    graph.gradient_of.update((gradient.id, variable.name) for variable, gradient in pairs)
    for variable, gradient in pairs:
        with graph.phase("update", variable.name):
            optimizer.update(graph, variable, gradient.cast(variable.dtype))
    with graph.phase("update", "step"):
        step = graph.step()
        graph.assign(graph.variables["step"], step + 1)
