"""Training a model: the loop, batches made ahead, checkpoints, evaluation."""

from mesh_tf_core.training.decoupled import Decoupled
from mesh_tf_core.training.trainer import Trainer
from mesh_tf_core.training.weights import Source

__all__ = ["Decoupled", "Source", "Trainer"]
