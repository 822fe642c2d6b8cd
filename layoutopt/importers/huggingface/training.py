"""The training of a configuration's model: hyperparameters that a configuration lacks."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core import model
from mesh_tf_core.errors import UserError


@dataclass(frozen=True)
class ConfiguredTraining(model.Training):
    """Hyperparameters of training.

    Attributes:
      batch: the number of sequences (images) per step.
      length: the number of tokens per sequence.
      attention: "fused" (one operation that never stores all logits) or "plain" (separate operations).
      capacity_factor: 0: the experts drop no tokens, as in Hugging Face's own code; otherwise their capacity,
        relative to an even distribution of tokens.
      imbalance: tokens of the device with most of them over the mean, where devices share the experts; time
        and memory are predicted with it.
      balance: the weight of the experts' load-balance loss (Fedus et al. 2022, equation 4).
      mtp: the number of layers that predict further tokens (multi-token prediction), with `mtp_weight` times
        their mean loss.
      ignore: names of fields of the configuration to ignore, separated by commas.
    """

    learning_rate: float = 1e-4
    batch: int = 8
    length: int = 2048
    attention: str = "fused"
    capacity_factor: float = 0.0
    imbalance: float = 1.0
    balance: float = 0.0
    mtp: int = 0
    mtp_weight: float = 0.3
    ignore: str = ""

    def __post_init__(self) -> None:
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
        if not 0 <= self.mtp <= 16:
            raise UserError(f"mtp is {self.mtp}; give the number of further tokens to predict, at most 16")
