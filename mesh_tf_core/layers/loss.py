"""Losses over classes: one of several classes, or independent classes."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import cast
from mesh_tf_core.ops.math import softplus
from mesh_tf_core.ops.reduce import reduce_mean, reduce_sum
from mesh_tf_core.ops.softmax import logsumexp, softmax_cross_entropy


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
            raise UserError(
                "CrossEntropy: label_smoothing must be at least 0 and less than 1, found "
                f"{self.label_smoothing}"
            )

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss [others].

        Args:
          logits: [others, dim].
          targets: int32 [others], or distributions [others, dim], which need not be one-hot (a teacher's,
            say).
        """
        soft = self.dim.name in targets.shape.names
        if not self.label_smoothing and not soft:
            return softmax_cross_entropy(logits, targets, self.dim, self.z_loss)
        logits = logits if logits.dtype == "float64" else cast(logits, "float32")
        lse = logsumexp(logits, self.dim)
        if not soft:
            sharp = softmax_cross_entropy(logits, targets, self.dim)
        elif set(targets.shape) == set(logits.shape):
            sharp = reduce_sum((lse - logits) * cast(targets, logits.dtype), self.dim)
        else:
            raise UserError(
                f"CrossEntropy: targets must be class ids without the dimension {self.dim!r}, or "
                f"probabilities with the dimensions of the logits [{logits.shape}]; found [{targets.shape}]"
            )
        loss = sharp + (lse - reduce_mean(logits, self.dim) - sharp) * self.label_smoothing
        return loss + lse * lse * self.z_loss if self.z_loss else loss


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-t log(sigmoid(x)) - (1 - t) log(1 - sigmoid(x)) for every element, in float32: softplus(x) - x t.

    Args:
      targets: probabilities t, of the logits' dimensions.
    """
    if set(targets.shape) != set(logits.shape):
        raise UserError(
            "sigmoid_cross_entropy: logits and targets must have the same dimensions, found "
            f"[{logits.shape}] and [{targets.shape}]"
        )
    logits = logits if logits.dtype == "float64" else cast(logits, "float32")
    return softplus(logits) - logits * cast(targets, logits.dtype)
