"""Losses over a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.dims import Dim
from mesh_tf_core.errors import UserError
from mesh_tf_core.ops.basic import cast
from mesh_tf_core.ops.reduce import reduce_mean
from mesh_tf_core.ops.softmax import logsumexp, softmax_cross_entropy
from mesh_tf_core.tensor import Tensor


@dataclass(frozen=True)
class CrossEntropy:
    """-sum over classes of q log softmax(logits), where q is 1 - label_smoothing at the target plus
    label_smoothing / size everywhere (Szegedy et al. 2016, section 7), in float32.

    Attributes:
      dim: the classes, which may be split: no device gathers them.
      label_smoothing: the share of the probability that is spread evenly.
      z_loss: weight of the square of the log-sum-exp, added to keep logits near zero.
    """

    dim: Dim
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"CrossEntropy: label_smoothing must be in [0, 1), found {self.label_smoothing}")

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits [others, dim], targets int32 [others] -> [others]."""
        if not self.label_smoothing:
            return softmax_cross_entropy(logits, targets, self.dim, self.z_loss)
        logits = logits if logits.dtype == "float64" else cast(logits, "float32")
        sharp = softmax_cross_entropy(logits, targets, self.dim)
        lse = logsumexp(logits, self.dim)
        loss = sharp + (lse - reduce_mean(logits, self.dim) - sharp) * self.label_smoothing
        return loss + lse * lse * self.z_loss if self.z_loss else loss
