"""Training a model: the loop, batches made ahead, checkpoints, evaluation."""

from typing import TYPE_CHECKING, Any

from mesh_tf_core.lazy import load

if TYPE_CHECKING:
    from mesh_tf_core.training.decoupled import Decoupled
    from mesh_tf_core.training.trainer import Trainer
    from mesh_tf_core.training.weights import Source

__all__ = ["Decoupled", "Source", "Trainer"]


def __getattr__(name: str) -> Any:
    return load(__name__, name)


def __dir__() -> list[str]:
    return __all__
