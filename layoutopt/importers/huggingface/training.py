"""How a model of a configuration is trained: what a configuration does not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.model import Model
from mesh_tf_core.optimizers import by_name


@dataclass(frozen=True)
class Training:
    """Hyperparameters of training.

    Attributes:
      batch, length: sequences (images) of a step, and tokens of each.
      dtype: of activations; variables and their updates are float32.
      warmup: steps up to the learning rate, which then falls with the root of the step; 0: it is constant.
      attention: fused, one operation that never holds all logits, or plain, written out.
      capacity_factor: places at the experts, relative to an even distribution; tokens beyond are dropped,
        which Hugging Face's own code does not do.
      balance: weight of the experts' load-balance loss (Fedus et al. 2022, equation 4).
      ignore: names of fields of the configuration to pass over, with commas between.
    """

    batch: int = 8
    length: int = 2048
    dtype: str = "float32"
    optimizer: str = "adam"
    learning_rate: float = 1e-4
    clip_norm: float = 0.0
    warmup: int = 0
    attention: str = "fused"
    capacity_factor: float = 1.25
    balance: float = 0.0
    ignore: str = ""

    def __post_init__(self) -> None:
        for name in ("batch", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")

    def model(
        self, loss: Tensor, name: str, tokens: Sequence[Dim] = (), metrics: Mapping[str, Tensor] | None = None
    ) -> Model:
        """The model of a loss."""
        optimizer = by_name(self.optimizer, self.learning_rate, self.clip_norm, warmup=self.warmup)
        return Model(loss, optimizer, metrics=metrics or {}, name=name, token_dims=tokens)
