"""Contrastive training of image and text encoders (Radford et al. 2021, "CLIP") on digits and their names.

    layoutopt search examples/clip.py:b32 --devices 64 --hardware tpu-v4
    layoutopt train examples/clip.py --layout auto --mesh "data:4" --steps 200

Every image is compared with every text of the batch. If `batch` is split, the text vectors are gathered.
Microbatches would change the loss, so they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn

END = 127
"""The token that ends a text: the largest one."""
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@trained(learning_rate=0.001, warmup=20)
def model(
    batch: int = 32,
    size: int = 16,
    colours: int = 1,
    patch: int = 4,
    image_layers: int = 2,
    image_width: int = 64,
    image_heads: int = 4,
    text_layers: int = 2,
    text_width: int = 64,
    text_heads: int = 4,
    vocab: int = 128,
    length: int = 16,
    joint: int = 32,
    attention: str = "fused",
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model.

    Args:
      size, patch: pixels along a side of the images, and of the squares that become tokens.
      length: tokens of a text, which ends with its largest token.
      joint: elements of the vectors that are compared.
      attention: "fused" (one operation that never stores all logits) or "plain" (products and a softmax).
    """
    g, b, e = training.graph("clip"), mtf.Dim("batch", batch), mtf.Dim("joint", joint)
    sides = [mtf.Dim("height", size), mtf.Dim("width", size), mtf.Dim("colours", colours)]
    image = g.input("image", [b, *sides], "float32").cast(training.dtype)
    text = g.input("text", [b, mtf.Dim("length", length)])

    def norm(x: mtf.Tensor, name: str) -> mtf.Tensor:
        return nn.LayerNorm(bias=True, name=name, epsilon=1e-5)(x)

    def stack(x: mtf.Tensor, kind: str, layers: int, heads: int, causal: bool) -> mtf.Tensor:
        width = x.dim("d_model").size
        layer = nn.EncoderLayer(
            nn.Attention(
                mtf.Dim("heads", heads),
                mtf.Dim("d_kv", width // heads),
                causal=causal,
                biases="all",
                attention=attention,
            ),
            nn.FeedForward(mtf.Dim("d_ff", 4 * width), "quick_gelu", bias=True),
            epsilon=1e-5,
        )
        return mtf.scan(layer, x, mtf.Dim(f"{kind}_layers", layers))

    def unit(x: mtf.Tensor) -> mtf.Tensor:
        """The normalised vectors [batch, joint] that are compared, in float32."""
        y = nn.Dense((e,), ("d_model",), name="projection")(x).cast("float32")
        return y * mtf.rsqrt(mtf.reduce_sum(mtf.square(y), e) + 1e-12)

    with g.scope("image"):
        x = norm(nn.ImageTokens(patch, mtf.Dim("d_model", image_width), bias=False)(image), "first_norm")
        x = stack(x, "image", image_layers, image_heads, causal=False)
        pictures = unit(norm(mtf.reduce_first(x, "length"), "final_norm"))
    with g.scope("text"):
        embedding = nn.Embedding(mtf.Dim("vocab", vocab), mtf.Dim("d_model", text_width), training.dtype)
        x = nn.LearnedPositions(length, stddev=0.01)(embedding(embedding.table(g), text))
        x = norm(stack(x, "text", text_layers, text_heads, causal=True), "final_norm")
        last = mtf.one_hot(mtf.argmax(text, "length"), text.dim("length"), x.dtype)
        said = mtf.rename(unit(mtf.einsum([x, last], [b, x.dim("d_model")], chooses=True)), batch="texts")
    scale = mtf.exp(g.variable("log_scale", [], mtf.Constant(math.log(1 / 0.07))))
    logits = mtf.einsum([pictures, said], [b, said.dim("texts")]) * scale
    # The right pair is on the diagonal; each image chooses among the texts, and each text among the images.
    right = mtf.einsum([pictures, mtf.rename(said, texts="batch")], [b]) * scale
    of_images = mtf.reduce_mean(mtf.logsumexp(logits, "texts"))
    of_texts = mtf.reduce_mean(mtf.logsumexp(logits, "batch"))
    loss = (of_images + of_texts) * 0.5 - mtf.reduce_mean(right)
    return training.model(loss, "clip")


b32 = partial(
    model,
    batch=32768,
    size=224,
    colours=3,
    patch=32,
    image_layers=12,
    image_width=768,
    image_heads=12,
    text_layers=12,
    text_width=512,
    text_heads=8,
    vocab=49408,
    length=77,
    joint=512,
    dtype="bfloat16",
)
"""CLIP ViT-B/32: 151,277,313 parameters."""


def data(
    batch: int = 32, size: int = 16, colours: int = 1, length: int = 16, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields digits and their names as bytes; every fifth digit is held out."""
    from examples.images import digits

    texts = np.zeros((10, length), np.int32)
    for row, name in zip(texts, NAMES, strict=True):
        tokens = [*f"the {name}".encode()[: length - 1], END]
        row[: len(tokens)] = tokens
    for found in digits(batch, size, split):
        yield {"image": np.repeat(found["image"], colours, -1), "text": texts[found["label"]]}
