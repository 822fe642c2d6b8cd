"""Training a model: the loop, batches made ahead, checkpoints, evaluation."""

from mesh_tf_core.training.trainer import Trainer

__all__ = ["Trainer"]
