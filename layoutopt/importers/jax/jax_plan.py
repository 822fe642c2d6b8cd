"""`plan.jax`: a plan back in the user's own JAX program.

Every decision of the plan is applied, or refused by name:
  layout        shardings of arguments, constraints of values (`constrain`)
  storage       shardings of parameters, gradients and the optimizer's state; parameters that are stored split
                are gathered where they are used
  recompute     jax.checkpoint of a loop's body, or of each layer that is written out; refused where they keep
                some of their values
  microbatches  a loop over parts of the batch that adds up gradients
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layoutopt.importers.jax.constrain import constrained
from layoutopt.importers.jax.shardings import Shardings
from layoutopt.importers.jax.step import Step
from mesh_tf_core.errors import UserError
from mesh_tf_core.lower.kept import Recomputed


class JaxPlan(Shardings):
    """A plan for a JAX function; arguments and attributes as `Shardings` has them."""

    def apply(self, loss: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The same function with its values placed and its loops recomputed as the plan says.

        Args:
          loss: the function that was imported; the default.

        Raises:
          UserError: what is recomputed keeps some of its values.
        """
        again = self.options.recompute
        for text in sorted(again):
            asked = Recomputed.parse(text)
            if asked.keep:
                raise UserError(
                    f"plan.jax: the plan recomputes {asked.dim} but for {', '.join(asked.keep)}; it can be "
                    f"recomputed whole: --recompute {asked.dim}, or search with --recompute auto"
                )
        return constrained(
            loss or self.origin.loss, self.placing, self.mesh, again, self.placing.split_stored
        )

    def train_step(self, loss: Callable[..., Any] | None, optimizer: Any) -> Step:
        """A training step under the plan, compiled when it first runs.

        Args:
          loss: the function that was imported, None for that.
          optimizer: of optax, or anything with its `init` and `update`.
        """
        return Step(self, self.apply(loss), optimizer)
