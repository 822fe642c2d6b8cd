"""Drawing from categorical distributions, the same under every layout."""

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.order import argmax
from mesh_tf_core.ops.random import random_uniform
from mesh_tf_core.ops.unary import unary


def sample_with_temperature(
    logits: Tensor, dim: Dim | str, temperature: float = 1.0, key: Tensor | None = None
) -> Tensor:
    """Draws int32 from softmax(logits / temperature) along `dim`, which may be split.

    The position of the largest of logits plus Gumbel noise is such a draw (Gumbel 1954). Temperature 0 takes
    the largest logit.

    Args:
      key: by default a new key of the graph, per step and loop iteration.
    """
    if temperature < 0:
        raise UserError(f"sample_with_temperature: temperature must be at least 0, found {temperature}")
    if temperature == 0:
        return argmax(logits, dim)
    key = logits.graph.random_key() if key is None else key
    noise = -unary("log", -unary("log", random_uniform(key, logits.shape, dtype="float32")))
    return argmax(logits.cast("float32") + noise * temperature, dim)


def random_categorical(logits: Tensor, dim: Dim | str, key: Tensor | None = None) -> Tensor:
    """int32 draws from softmax(logits) along `dim`."""
    return sample_with_temperature(logits, dim, 1.0, key)
