"""A JAX model to start from: put your own loss in its place, then

layoutopt search model.py --mesh "data:2;model:4"        find the best layout
layoutopt train model.py --layout auto --mesh "data:2;model:4" --steps 100
layoutopt search model.py --devices 64 --hardware tpu-v4 --set hidden=8192
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import layoutopt
import mesh_tf_core as mtf


# Your own function: of parameters and a batch to a scalar. It is traced once and not changed; Flax, Equinox
# and Haiku models are called here as anywhere else.
def loss(params: Any, batch: Any) -> Any:
    """Two dense layers that classify points."""
    y = jax.nn.relu(batch["x"] @ params["first"]["weight"] + params["first"]["bias"])
    log = jax.nn.log_softmax(y @ params["second"]["weight"])
    return -jnp.take_along_axis(log, batch["label"][:, None], axis=-1).mean()


# Every hyperparameter has a default; `--set name=value` changes it. Types of arrays are enough: of a Flax
# model, `jax.eval_shape(model.init, key, x)` has them. Give arrays to begin from their values.
def model(
    batch: int = 64, features: int = 32, hidden: int = 256, classes: int = 8, learning_rate: float = 0.003
) -> mtf.Model:
    """The loss as a model; its dimensions are inferred."""

    def array(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    params = {
        "first": {"weight": array(features, hidden), "bias": array(hidden)},
        "second": {"weight": array(hidden, classes)},
    }
    given = {"x": array(batch, features), "label": array(batch, dtype=jnp.int32)}
    # The names of dimensions say what they do; this one would be called by the path of its parameter.
    names = {"first/weight": ("features", "hidden")}
    return layoutopt.from_jax(loss, params, given, optimizer=mtf.Adam(learning_rate), names=names)


# Optional, for `train` and `measure`: batches, by the paths of the batch's arrays. It takes those
# hyperparameters that it needs, and `split`, which is "train" or "held-out".
def data(batch: int, features: int, classes: int, split: str = "train") -> Iterator[dict[str, np.ndarray]]:
    """Points around one centre per class."""
    centres = np.random.default_rng(0).normal(size=(classes, features))
    rng = np.random.default_rng(1 if split == "train" else 2)
    while True:
        label = rng.integers(0, classes, batch)
        points = centres[label] + rng.normal(size=(batch, features))
        yield {"x": points.astype(np.float32), "label": label.astype(np.int32)}
