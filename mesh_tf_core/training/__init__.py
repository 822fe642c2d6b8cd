"""Training a model: the loop, batches made ahead, checkpoints, evaluation."""

from mesh_tf_core.training.trainer import Trainer
from mesh_tf_core.training.weights import Source

__all__ = ["Source", "Trainer"]
