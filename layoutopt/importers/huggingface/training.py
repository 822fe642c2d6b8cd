"""The training of a configuration's model: hyperparameters that a configuration lacks."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core import model
from mesh_tf_core.errors import UserError


@dataclass(frozen=True)
class ConfiguredTraining(model.Training):
    """Hyperparameters of training.

    Attributes:
      batch, length: sequences (images) of a step, and tokens of each.
      attention: fused, one operation that never holds all logits, or plain, written out.
      capacity_factor: places at the experts, relative to an even distribution; tokens beyond are dropped,
        which Hugging Face's own code does not do.
      balance: weight of the experts' load-balance loss (Fedus et al. 2022, equation 4).
      ignore: names of fields of the configuration to pass over, with commas between.
    """

    learning_rate: float = 1e-4
    batch: int = 8
    length: int = 2048
    attention: str = "fused"
    capacity_factor: float = 1.25
    balance: float = 0.0
    ignore: str = ""

    def __post_init__(self) -> None:
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; give a whole number of at least 1")
