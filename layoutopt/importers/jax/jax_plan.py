"""`plan.jax`: a plan back in the user's own JAX program.

Every decision of the plan is applied, or refused by name:
  layout        shardings of arguments, constraints of values (`constrain`)
  storage       shardings of parameters, gradients and the optimizer's state; parameters that are stored split
                are gathered where they are used
  recompute     jax.checkpoint of a loop's body, or of each layer that is written out, with a policy
                that saves what they keep; refused where that is not a value of the function
  microbatches  a loop over parts of the batch that adds up gradients
  others        refused (`layoutopt.frameworks.jax`): no sharding says them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layoutopt.frameworks import says
from layoutopt.importers.arrays.saved import saved_values
from layoutopt.importers.jax.constrain import constrained
from layoutopt.importers.jax.shardings import Shardings
from layoutopt.importers.jax.step import OptimizerStep
from layoutopt.plan.build import decided
from layoutopt.space.decisions import beyond
from layoutopt.space.keywords import in_keywords
from mesh_tf_core.errors import UserError


class JaxPlan(Shardings):
    """A plan for a JAX function; arguments and attributes as `Shardings` has them."""

    def apply(self, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The same function with its values placed and its loops recomputed as in the plan.

        Args:
          loss: the function that was imported; the default.

        Raises:
          UserError: a kept value is not a value of the function.
        """
        again = self.options.recompute
        saved = saved_values(self.model.step_graph, self.origin, again)
        mesh, layout = self.placing.mesh, self.placing.layout
        said = decided(self.options, layout, self.model.stages(mesh, layout))
        if lost := beyond(says("jax"), said):
            why = f"plan.jax: JAX shardings cannot express this plan, in which {lost.words}; {lost.instead}"
            raise UserError(in_keywords(why))
        return constrained(
            loss or self.origin.loss,
            self.placing,
            self.mesh,
            frozenset(each.dim for each in again),
            self.placing.split_stored,
            saved,
        )

    def train_step(self, loss: Callable[..., Any] | None, optimizer: Any) -> OptimizerStep:
        """A training step under the plan, compiled when it first runs.

        Args:
          loss: the function that was imported, None for that.
          optimizer: of optax, or anything with its `init` and `update`.
        """
        return OptimizerStep(self, self.apply(loss), optimizer)
