"""The parts of encoders of text and images: a layer of a Transformer, and images as tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention
from mesh_tf_core.layers.dense import FeedForward
from mesh_tf_core.layers.norm import LayerNorm
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.random import dropout
from mesh_tf_core.ops.shape import concat, rename, reshape


@dataclass(frozen=True)
class EncoderLayer:
    """Attention, then a feed-forward block, each with normalisation and added to its input, with biases.

    Attributes:
      attention, feed_forward: the blocks.
      after: normalises the sums (Vaswani et al. 2017, BERT) instead of the inputs of the blocks (ViT, CLIP).
      dropout: rate on the blocks' outputs.
      epsilon: of the normalisations.
    """

    attention: Attention
    feed_forward: FeedForward
    after: bool = False
    dropout: float = 0.0
    epsilon: float = 1e-6

    def __call__(self, x: Tensor) -> Tensor:
        """[others, length, d_model] -> the same."""
        for block, name in ((self.attention, "attention_norm"), (self.feed_forward, "feed_forward_norm")):
            norm = LayerNorm(bias=True, name=name, epsilon=self.epsilon)
            y = dropout(block(x if self.after else norm(x)), self.dropout)
            x = norm(x + y) if self.after else x + y
        return x


@dataclass(frozen=True)
class ImageTokens:
    """An image as tokens: a learned token for the `whole` image, if so, then one per square of pixels, with
    learned positions (Dosovitskiy et al. 2021, "An image is worth 16x16 words", section 3.1).

    Attributes:
      patch: pixels along a square's side.
      bias: of the squares' product.
    """

    patch: int
    d_model: Dim
    bias: bool = True
    whole: bool = True
    name: str = "embedding"

    def __call__(self, image: Tensor) -> Tensor:
        """[batch, height, width, colours] -> [batch, length, d_model]."""
        g, (batch, height, width, colours) = image.graph, image.shape.dims
        for side in (height, width):
            if self.patch < 1 or side.size % self.patch:
                raise UserError(
                    f"ImageTokens: patch={self.patch} must divide the size of {side.name!r}, {side.size} "
                    "pixels"
                )
        rows, columns = Dim("rows", height.size // self.patch), Dim("columns", width.size // self.patch)
        inner = [Dim("patch_height", self.patch), Dim("patch_width", self.patch), colours]
        x = reshape(image, [batch, rows, inner[0], columns, inner[1], colours])
        length = Dim("length", rows.size * columns.size)
        with g.scope(self.name):
            stddev = Normal(1 / math.sqrt(self.patch**2 * colours.size))
            w = g.variable("weight", [*inner, self.d_model], stddev, activation_dtype=x.dtype)
            y = reshape(einsum([x, w], [batch, rows, columns, self.d_model]), [batch, length, self.d_model])
            if self.bias:
                y = y + g.variable("bias", [self.d_model], ZEROS, activation_dtype=x.dtype)
            one, all_tokens = Dim("length", 1), Dim("positions", self.whole + length.size)
            if self.whole:
                whole = g.variable("class", [self.d_model], Normal(0.02), activation_dtype=x.dtype)
                y = concat([broadcast(whole, [batch, one, self.d_model]), y], "length")
            at = g.variable("positions", [all_tokens, self.d_model], Normal(0.02), activation_dtype=x.dtype)
            return y + rename(at, positions="length")
