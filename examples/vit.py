"""A vision Transformer (Dosovitskiy et al. 2021, "An image is worth 16x16 words") on scikit-learn's digits.

layoutopt search examples/vit.py:b16 --devices 8 --hardware tpu-v5e
layoutopt train examples/vit.py --layout auto --mesh "data:2;model:2" --steps 200
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn


@trained(learning_rate=0.001)
def model(
    layers: int = 4,
    d_model: int = 64,
    heads: int = 4,
    d_ff: int = 256,
    size: int = 16,
    patch: int = 4,
    colours: int = 1,
    classes: int = 10,
    batch: int = 32,
    dropout: float = 0.0,
    attention: str = "fused",
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model, which classifies images by their first token.

    Args:
      size: height and width of the images, a multiple of 8; patch: of the squares that become tokens.
      attention: "fused" (one operation that never stores all logits) or "plain" (products and a softmax).
    """
    g, b = training.graph("vit"), mtf.Dim("batch", batch)
    d, c = mtf.Dim("d_model", d_model), mtf.Dim("classes", classes)
    sides = [mtf.Dim("height", size), mtf.Dim("width", size), mtf.Dim("colours", colours)]
    image, label = g.input("image", [b, *sides], "float32"), g.input("label", [b])
    layer = nn.EncoderLayer(
        nn.Attention(
            mtf.Dim("heads", heads),
            mtf.Dim("d_kv", d_model // heads),
            dropout=dropout,
            biases="all",
            attention=attention,
        ),
        nn.FeedForward(mtf.Dim("d_ff", d_ff), "gelu_exact", bias=True, dropout=dropout),
        dropout=dropout,
    )
    x = nn.ImageTokens(patch, d)(image.cast(training.dtype))
    x = mtf.scan(layer, mtf.dropout(x, dropout), mtf.Dim("layers", layers))
    x = mtf.reduce_first(nn.LayerNorm(bias=True, name="final_norm")(x), "length")
    logits = nn.Dense((c,), ("d_model",), bias=True, name="output")(x)
    right = mtf.reduce_mean(mtf.argmax(logits, c).equal(label).cast("float32"))
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, label, c))
    return training.model(loss, "vit", metrics={"accuracy": right})


b16 = partial(
    model,
    layers=12,
    d_model=768,
    heads=12,
    d_ff=3072,
    size=224,
    patch=16,
    colours=3,
    classes=1000,
    batch=1024,
    dtype="bfloat16",
)
"""ViT-B/16 for ImageNet: 86,567,656 parameters."""


def data(
    batch: int = 32, size: int = 16, colours: int = 1, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields grey digits, enlarged to size x size; every fifth digit is held out."""
    from examples.images import digits

    for found in digits(batch, size, split):
        yield {**found, "image": np.repeat(found["image"], colours, -1)}
