"""A multi-layer perceptron with named dimensions on handwritten digits (scikit-learn's 8x8 images).

layoutopt train examples/mlp.py --layout auto --mesh "data:4" --steps 300
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.optimizers import by_name


def model(
    batch: int = 64,
    hidden: int = 128,
    layers: int = 2,
    dtype: str = "float32",
    optimizer: str = "adam",
    learning_rate: float = 0.003,
    clip_norm: float = 0.0,
) -> mtf.Model:
    """Builds the model: `layers` hidden layers with gelu, then ten classes."""
    g = mtf.Graph("mlp")
    b, c = mtf.Dim("batch", batch), mtf.Dim("classes", 10)
    pixels, h = mtf.Dim("pixels", 64), mtf.Dim("hidden", hidden)
    x = g.input("image", [b, pixels], "float32").cast(dtype)
    labels = g.input("label", [b])
    for i in range(layers):
        inner, out = (
            (pixels if i == 0 else mtf.Dim(f"hidden_{i}", hidden)),
            (h if i == layers - 1 else mtf.Dim(f"hidden_{i + 1}", hidden)),
        )
        with g.scope(f"layer_{i}"):
            w = g.variable(
                "weight", [inner, out], mtf.Normal(1 / math.sqrt(inner.size)), activation_dtype=dtype
            )
            bias = g.variable("bias", [out], mtf.ZEROS, activation_dtype=dtype)
            x = mtf.gelu(mtf.einsum([x, w], [b, out]) + bias)
    with g.scope("output"):
        w = g.variable("weight", [h, c], mtf.Normal(1 / math.sqrt(hidden)), activation_dtype=dtype)
        logits = mtf.einsum([x, w], [b, c])
        loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, labels, c))
    top = mtf.reduce_max(logits, c)
    # A label whose logit is the largest counts as right.
    right = mtf.reduce_mean((mtf.pick(logits, labels, c) >= top).cast("float32"))
    optimiser = by_name(optimizer, learning_rate, clip_norm)
    return mtf.Model(loss, optimiser, metrics={"accuracy": right}, name="mlp")


def data(batch: int = 64, split: str = "train", **_: object) -> Iterator[dict[str, np.ndarray]]:
    """Yields digits in [0, 1]; every fifth image is held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    held = np.arange(len(digits.target)) % 5 == 4
    chosen = held if split == "held-out" else ~held
    images = (digits.data[chosen] / 16).astype(np.float32)
    labels = digits.target[chosen].astype(np.int32)
    rng = np.random.default_rng(0)
    while True:
        pick = rng.integers(0, len(labels), batch)
        yield {"image": images[pick], "label": labels[pick]}
