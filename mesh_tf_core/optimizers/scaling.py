"""Loss scaling: gradients of half-precision activations that would vanish in float16 are computed of a larger
loss.

Micikevicius et al. 2018, "Mixed precision training", section 3.2: the loss is multiplied by s before
backward, gradients are divided by s before the update. A step with a gradient that is not finite is left out
whole and s is halved; after `growth_interval` good steps in a row s is doubled.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.initializers import Constant, Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.math import maximum, minimum
from mesh_tf_core.tracing.graph import Graph

SCALE, GOOD = "loss_scale", "loss_scale/good_steps"
"""Names of the variables: the scale, and the number of consecutive finite steps."""
LARGEST = 2.0**24


@dataclass(frozen=True)
class LossScale:
    """The scale of the loss and the rule that changes it.

    Attributes:
      initial: the first scale, a power of two, so that scaling rounds nothing.
      growth_interval: number of good steps after which the scale doubles; 0 keeps it at `initial`. Steps with
        infinite gradients are always skipped.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= LARGEST:
            raise UserError(f"LossScale: initial must be from 1 to {LARGEST:g}, found {self.initial}")
        if self.growth_interval < 0:
            raise UserError(
                f"LossScale: growth_interval must be at least 0 steps, found {self.growth_interval}"
            )

    def scale(self, graph: Graph) -> Tensor:
        """The float32 scale of this step."""
        return graph.read(_state(graph, SCALE, self.initial))

    def updates(self, graph: Graph, finite: Tensor) -> list[tuple[Variable, Tensor]]:
        """The next scale, given whether (bool scalar) all gradients of this step were finite."""
        if not self.growth_interval:
            return []
        scale, good = _state(graph, SCALE, self.initial), _state(graph, GOOD, 0.0)
        now, count = graph.read(scale), graph.read(good) + 1.0
        grow = count >= float(self.growth_interval)
        larger = where(grow, minimum(now * 2.0, LARGEST), now)
        kept = where(grow, count * 0.0, count)
        return [
            (scale, where(finite, larger, maximum(now * 0.5, 1.0))),
            (good, where(finite, kept, count * 0.0)),
        ]


def _state(graph: Graph, name: str, initial: float) -> Variable:
    if name not in graph.variables:
        graph.declare(Variable(name, Shape(), "float32", Constant(initial), False, 0))
    return graph.variables[name]
