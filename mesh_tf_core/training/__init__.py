"""Training a model: the loop, batches made ahead, checkpoints, evaluation."""

from typing import TYPE_CHECKING

from mesh_tf_core.lazy import lazily

if TYPE_CHECKING:
    from mesh_tf_core.training.decoupled import Decoupled
    from mesh_tf_core.training.trainer import Trainer
    from mesh_tf_core.training.weights import Source

__all__ = ["Decoupled", "Source", "Trainer"]

__getattr__, __dir__ = lazily(__name__, __all__)
