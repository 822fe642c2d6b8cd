"""The losses of a training: one that is no finite number ends it."""

from __future__ import annotations

import math

from mesh_tf_core.errors import UserError

SKIPPED = 20
"""Steps in a row that a loss scale may leave out before the run is given up."""


class FiniteLoss:
    """Looks at the loss of every step.

    Args:
      scaled: a loss scale leaves out steps whose numbers are too large, and tries smaller ones.
    """

    def __init__(self, scaled: bool) -> None:
        self.scaled, self._skipped = scaled, 0

    def check(self, step: int, loss: float) -> None:
        """UserError for a loss that is no finite number, or for too many of them in a row."""
        if math.isfinite(loss):
            self._skipped = 0
            return
        self._skipped += 1
        if self.scaled and self._skipped < SKIPPED:
            return
        tried = f"and in the {SKIPPED - 1} before it, which the loss scale left out" if self.scaled else ""
        raise UserError(
            f"the loss is {loss} in step {step}{f', {tried}' if tried else ''}; try a smaller "
            "learning rate, a warm-up, clip_norm in the optimizer, or float32 activations, and look at that "
            "step's batch"
        )
