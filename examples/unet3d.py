"""A 3-D U-Net (Cicek et al. 2016) that segments slanted digits in noisy volumes.

    layoutopt search examples/unet3d.py --mesh "data:2;slabs:2"
    layoutopt train examples/unet3d.py --layout "depth:slabs" --mesh "slabs:4" --steps 60

Volumes are often too large for one device. Splitting `depth`, `height` or `width` splits the activations too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn

SPACE = ("depth", "height", "width")


@trained(learning_rate=0.003)
def model(
    batch: int = 4,
    size: int = 16,
    channels: int = 8,
    levels: int = 2,
    groups: int = 4,
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model.

    Args:
      size: of the volumes along each dimension, a multiple of 8.
      channels: at full resolution; twice as many on every lower level.
      levels: how often the volume is halved.
      groups: number of channel groups of the normalisation.
    """
    g = training.graph("unet3d")
    space = [mtf.Dim("batch", batch), *(mtf.Dim(n, size) for n in SPACE)]
    classes = mtf.Dim("classes", 2)
    x = g.input("volume", [*space, mtf.Dim("colours", 1)], "float32").cast(training.dtype)
    filled = g.input("filled", space)

    def conv(x: mtf.Tensor, level: int, name: str, **fields: object) -> mtf.Tensor:
        width = mtf.Dim("channels", channels << level)
        return nn.Conv(width, SPACE, name=name, **fields)(x)  # type: ignore[arg-type]

    def smooth(x: mtf.Tensor, name: str) -> mtf.Tensor:
        return mtf.gelu(nn.GroupNorm(SPACE, groups, name=name)(x))

    x = conv(x, 0, "stem", inputs="colours")
    kept = []
    for level in range(levels):
        with g.scope(f"down_{level}"):
            x = conv(smooth(x, "norm"), level, "conv")
            kept.append(x)
            x = conv(smooth(x, "half_norm"), level + 1, "half", stride=2)
    with g.scope("bottom"):
        x = conv(smooth(x, "norm"), levels, "conv")
    for level in reversed(range(levels)):
        with g.scope(f"up_{level}"):
            x = conv(smooth(x, "norm"), level, "double", stride=2, transposed=True)
            # The convolution of both, side by side in the channels, is the sum of a convolution of each.
            x = conv(x, level, "conv") + conv(kept[level], level, "across")
    logits = nn.Dense((classes,), ("channels",), bias=True, name="output")(smooth(x, "final_norm"))
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, filled, classes))
    right = mtf.reduce_mean(mtf.argmax(logits, classes).equal(filled).cast("float32"))
    return training.model(loss, "unet3d", metrics={"accuracy": right})


def data(
    batch: int = 4, size: int = 16, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields noisy volumes of size x size x size with a digit; every fifth digit is held out."""
    from examples.images import solids

    return solids(batch, size, split)
