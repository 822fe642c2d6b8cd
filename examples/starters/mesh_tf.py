"""A model to start from: change it, then

layoutopt search model.py --mesh "data:2;model:4"        find the best layout
layoutopt train model.py --layout auto --mesh "data:2;model:4" --steps 100
layoutopt search model.py --devices 64 --hardware tpu-v4 --set hidden=8192
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf


# Every hyperparameter has a default; `--set name=value` changes it. Nothing is computed here, and no device
# is named: the function only says which named dimensions there are and what is done with them.
def model(
    batch: int = 64, features: int = 32, hidden: int = 256, classes: int = 8, learning_rate: float = 0.003
) -> mtf.Model:
    """Two dense layers that classify points into `classes` kinds."""
    g = mtf.Graph("two_layers")

    # A dimension is a name and a size. The layout will say which of them are split over which mesh axes.
    b, f = mtf.Dim("batch", batch), mtf.Dim("features", features)
    h, c = mtf.Dim("hidden", hidden), mtf.Dim("classes", classes)

    # What `data` below gives for every step.
    x = g.input("x", [b, f], "float32")
    label = g.input("label", [b], "int32")

    # An einsum multiplies, and sums out every dimension that its result does not keep.
    with g.scope("first"):
        weight = g.variable("weight", [f, h], mtf.Normal(1 / math.sqrt(features)))
        bias = g.variable("bias", [h], mtf.ZEROS)
        y = mtf.relu(mtf.einsum([x, weight], [b, h]) + bias)
    with g.scope("second"):
        weight = g.variable("weight", [h, c], mtf.Normal(1 / math.sqrt(hidden)))
        logits = mtf.einsum([y, weight], [b, c])

    # A model is a scalar to minimise and an optimizer; gradients follow.
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, label, c))
    return mtf.Model(loss, mtf.Adam(learning_rate), name="two_layers")


# Optional, for `train` and `measure`: batches, by the names of the inputs. It takes those hyperparameters
# that it needs, and `split`, which is "train" or "held-out".
def data(batch: int, features: int, classes: int, split: str = "train") -> Iterator[dict[str, np.ndarray]]:
    """Points around one centre per class."""
    centres = np.random.default_rng(0).normal(size=(classes, features))
    rng = np.random.default_rng(1 if split == "train" else 2)
    while True:
        label = rng.integers(0, classes, batch)
        points = centres[label] + rng.normal(size=(batch, features))
        yield {"x": points.astype(np.float32), "label": label.astype(np.int32)}
