"""`plan.jax`: a plan back in the user's own JAX program.

Every decision of the plan is applied, or refused by name:
  layout        shardings of arguments, constraints of values (`constrain`)
  storage       shardings of parameters, gradients and the optimizer's state; parameters that are stored split
                are gathered where they are used
  recompute     jax.checkpoint of a loop's body, or of each layer that is written out, with a policy
                that saves what they keep; refused where that is no value of the function
  offload       refused: the user's own step would have to move it
  context       refused: it is done between devices
  diloco        refused: it is another training loop
  microbatches  a loop over parts of the batch that adds up gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layoutopt.importers.jax.constrain import constrained
from layoutopt.importers.jax.saved import saved_values
from layoutopt.importers.jax.shardings import Shardings
from layoutopt.importers.jax.step import Step
from mesh_tf_core.errors import UserError
from mesh_tf_core.lower.kept import dims_of


class JaxPlan(Shardings):
    """A plan for a JAX function; arguments and attributes as `Shardings` has them."""

    def apply(self, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The same function with its values placed and its loops recomputed as the plan says.

        Args:
          loss: the function that was imported; the default.

        Raises:
          UserError: what is kept is no value of the function.
        """
        again = self.options.recompute
        saved = saved_values(self.model.step_graph, self.origin, again)
        if rare := self.options.diloco:
            raise UserError(
                f"plan.jax: replicas along {rare.axis!r} train alone for {rare.period} steps, which no step "
                "of yours says; train with `layoutopt train`"
            )
        if context := dict(self.options.context):
            dim, form = next(iter(context.items()))
            raise UserError(
                f"plan.jax: the plan's attention to {dim!r} is {form}, which no sharding says; search with "
                "context=['gather']"
            )
        if dims := sorted(self.options.collective_matmul):
            raise UserError(
                f"plan.jax: the plan sends in chunks beside products with {dims[0]!r}, which no sharding "
                "says; search without collective_matmul"
            )
        if offload := sorted(self.options.offload):
            kind, name = offload[0]
            raise UserError(
                f"plan.jax: the plan keeps {kind} of {name!r} on the hosts, which your own step does not; "
                "search without offload"
            )
        return constrained(
            loss or self.origin.loss,
            self.placing,
            self.mesh,
            dims_of(again),
            self.placing.split_stored,
            saved,
        )

    def train_step(self, loss: Callable[..., Any] | None, optimizer: Any) -> Step:
        """A training step under the plan, compiled when it first runs.

        Args:
          loss: the function that was imported, None for that.
          optimizer: of optax, or anything with its `init` and `update`.
        """
        return Step(self, self.apply(loss), optimizer)
