"""A residual network (He et al. 2016) on scikit-learn's handwritten digits. Images can be split over devices.

    layoutopt search examples/resnet.py --mesh "data:2;rows:2"
    layoutopt train examples/resnet.py --layout "batch:data;height:rows" --mesh "data:2;rows:2" --steps 100

Splitting `height` or `width` is spatial partitioning: devices exchange the borders of their parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn

PLANE = ("height", "width")


@trained(learning_rate=0.003)
def model(
    batch: int = 32,
    size: int = 32,
    channels: int = 16,
    stages: int = 3,
    blocks: int = 2,
    groups: int = 4,
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model.

    Args:
      size: height and width of the images, a multiple of 8.
      channels: channels of the first stage; each later stage has twice as many, at half the resolution.
      blocks: residual blocks of two convolutions per stage, the first of which halves the image (not in the
        first stage).
      groups: number of channel groups of the normalisation.
    """
    g = training.graph("resnet")
    b, classes = mtf.Dim("batch", batch), mtf.Dim("classes", 10)
    image = [b, mtf.Dim("height", size), mtf.Dim("width", size), mtf.Dim("colours", 1)]
    labels = g.input("label", [b])
    x = g.input("image", image, "float32").cast(training.dtype)

    def norm(x: mtf.Tensor, name: str) -> mtf.Tensor:
        return nn.GroupNorm(PLANE, groups, name=name)(x)

    def block(x: mtf.Tensor, width: mtf.Dim, stride: int) -> mtf.Tensor:
        """Normalisation before each convolution (He et al. 2016, "Identity mappings")."""
        y = nn.Conv(width, PLANE, stride=stride, name="conv_1")(mtf.gelu(norm(x, "norm_1")))
        y = nn.Conv(width, PLANE, name="conv_2")(mtf.gelu(norm(y, "norm_2")))
        same = stride == 1 and x.dim("channels") == width
        return y + (x if same else nn.Conv(width, PLANE, 1, stride, name="shortcut")(x))

    x = nn.Conv(mtf.Dim("channels", channels), PLANE, inputs="colours", name="stem")(x)
    for stage in range(stages):
        width = mtf.Dim("channels", channels << stage)
        with g.scope(f"stage_{stage}"):
            with g.scope("first"):
                x = block(x, width, 1 if stage == 0 else 2)
            if blocks > 1:
                rest = mtf.Dim(f"blocks_{stage}", blocks - 1)
                x = mtf.scan(lambda x, width=width: block(x, width, 1), x, rest)
    x = mtf.reduce_mean(mtf.gelu(norm(x, "final_norm")), PLANE)
    logits = nn.Dense((classes,), ("channels",), bias=True, name="output")(x)
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, labels, classes))
    right = mtf.reduce_mean(mtf.argmax(logits, classes).equal(labels).cast("float32"))
    return training.model(loss, "resnet", metrics={"accuracy": right})


def data(
    batch: int = 32, size: int = 32, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields digits, enlarged to size x size; every fifth digit is held out."""
    from examples.images import digits

    return digits(batch, size, split)
