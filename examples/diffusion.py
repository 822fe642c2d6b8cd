"""A diffusion model's U-Net (Ho et al. 2020, "Denoising diffusion probabilistic models") on digits.

    layoutopt search examples/diffusion.py:cifar10 --devices 8 --hardware tpu-v4
    layoutopt train examples/diffusion.py --layout "batch:data;height:rows" --mesh "data:2;rows:2" --steps 200

Splitting `height` or `width` is spatial partitioning: devices exchange the borders of their parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from examples.training import Training, trained
from mesh_tf_core import layers as nn

PLANE = ("height", "width")


@trained(learning_rate=0.002)
def model(
    batch: int = 16,
    size: int = 16,
    colours: int = 1,
    channels: int = 16,
    widths: tuple[int, ...] = (1, 2),
    blocks: int = 1,
    attend: int = 8,
    groups: int = 8,
    steps: int = 1000,
    dropout: float = 0.0,
    *,
    training: Training,
) -> mtf.Model:
    """Builds the model, which predicts the noise that was added to an image.

    Args:
      size: pixels along a side, a multiple of 8.
      channels, widths, blocks, attend, groups, dropout: of the `UNet`.
      steps: number of noise steps; the input `step` is the number that was applied to each image.
    """
    g, b = training.graph("diffusion"), mtf.Dim("batch", batch)
    shape = [b, mtf.Dim("height", size), mtf.Dim("width", size), mtf.Dim("colours", colours)]
    image, noise = (g.input(name, shape, "float32") for name in ("image", "noise"))
    step = g.input("step", [b])
    at, left = mtf.Dim("steps", steps), np.cumprod(1 - np.linspace(1e-4, 0.02, steps))
    clean, noisy = (
        mtf.gather(mtf.constant(g, t, [at], "float32"), step, at) for t in (left**0.5, (1 - left) ** 0.5)
    )
    network = UNet(channels, widths, blocks, attend, groups, dropout)
    found = network((image * clean + noise * noisy).cast(training.dtype), step).cast("float32")
    return training.model(mtf.reduce_mean(mtf.square(found - noise)), "diffusion")


@dataclass(frozen=True)
class UNet:
    """Predicts the noise in an image from the image and its noise step (Ho et al. 2020, appendix B).

    Attributes:
      channels: at full resolution; `widths`: how many times as many on each level, each half as large as the
        one before.
      blocks: of two convolutions each, on each level of the way down, and one more on the way up.
      attend: resolution (pixels along a side) at which places attend to each other.
      groups: number of channel groups of the normalisation.
      dropout: rate in the blocks.
    """

    channels: int
    widths: tuple[int, ...]
    blocks: int
    attend: int
    groups: int
    dropout: float = 0.0

    def __call__(self, x: mtf.Tensor, step: mtf.Tensor) -> mtf.Tensor:
        """x [batch, height, width, colours] and step, an int32 [batch] or scalar -> as x."""
        g, colours, last = x.graph, x.dim("colours"), len(self.widths) - 1
        inner, d_time = mtf.Dim("d_inner", 4 * self.channels), mtf.Dim("d_time", 4 * self.channels)
        with g.scope("time"):
            time = waves(step, self.channels).cast(x.dtype)
            time = nn.Dense((inner,), ("channels",), True, "silu", "first")(time)
            # Every block wants its silu.
            time = nn.Dense((d_time,), ("d_inner",), True, "silu", "second")(time)
        x = self._conv(x, self.channels, "stem", inputs="colours")
        kept = [x]
        for level, times in enumerate(self.widths):
            for i in range(self.blocks):
                x = self._stage(x, time, self.channels * times, f"down_{level}_{i}")
                kept.append(x)
            if level < last:
                x = self._conv(x, self.channels * times, f"half_{level}", stride=2)
                kept.append(x)
        with g.scope("middle"):
            width = self.channels * self.widths[-1]
            with g.scope("first"):
                x = self._attended(self._block(x, time, width))
            with g.scope("second"):
                x = self._block(x, time, width)
        for level, times in reversed(list(enumerate(self.widths))):
            for i in range(self.blocks + 1):
                both = mtf.concat([x, kept.pop()], "channels")
                x = self._stage(both, time, self.channels * times, f"up_{level}_{i}")
            if level:
                x = self._conv(doubled(x), self.channels * times, f"double_{level}")
        x = mtf.silu(self._norm(x, "final_norm"))
        return nn.Conv(colours, PLANE, bias=True, inputs="channels", name="output")(x)

    def _conv(self, x: mtf.Tensor, width: int, name: str, **fields: Any) -> mtf.Tensor:
        return nn.Conv(mtf.Dim("channels", width), PLANE, bias=True, name=name, **fields)(x)

    def _norm(self, x: mtf.Tensor, name: str) -> mtf.Tensor:
        return nn.GroupNorm(PLANE, self.groups, name=name, epsilon=1e-6)(x)

    def _block(self, x: mtf.Tensor, time: mtf.Tensor, width: int) -> mtf.Tensor:
        y = self._conv(mtf.silu(self._norm(x, "norm_1")), width, "conv_1")
        y = y + nn.Dense((y.dim("channels"),), ("d_time",), True, name="time")(time)
        y = mtf.dropout(mtf.silu(self._norm(y, "norm_2")), self.dropout)
        y = self._conv(y, width, "conv_2")
        return y + (x if x.dim("channels").size == width else self._conv(x, width, "shortcut", size=1))

    def _attended(self, x: mtf.Tensor) -> mtf.Tensor:
        """Every place of x [batch, height, width, channels] sees all others."""
        b, height, width, c = x.shape.dims
        one = nn.Attention(mtf.Dim("heads", 1), mtf.Dim("d_kv", c.size), biases="all", d_model="channels")
        flat = mtf.reshape(
            self._norm(x, "attention_norm"), [b, mtf.Dim("length", height.size * width.size), c]
        )
        return x + mtf.reshape(one(flat), x.shape)

    def _stage(self, x: mtf.Tensor, time: mtf.Tensor, width: int, name: str) -> mtf.Tensor:
        with x.graph.scope(name):
            x = self._block(x, time, width)
            return self._attended(x) if x.dim("height").size == self.attend else x


def waves(step: mtf.Tensor, channels: int) -> mtf.Tensor:
    """[batch, channels]: sines, then cosines, of the step in wavelengths from 2 pi to 20,000 pi."""
    half = channels // 2
    rates = np.exp(np.arange(half) * (-math.log(10000) / (half - 1))).astype(np.float32)
    angle = step.cast("float32") * mtf.constant(step.graph, rates, [mtf.Dim("channels", half)])
    return mtf.concat([mtf.sin(angle), mtf.cos(angle)], "channels")


def doubled(x: mtf.Tensor) -> mtf.Tensor:
    """Doubles the height and width of x [batch, height, width, channels] by repetition."""
    b, height, width, c = x.shape.dims
    more = [b, height, mtf.Dim("height_again", 2), width, mtf.Dim("width_again", 2), c]
    sides = [mtf.Dim("height", 2 * height.size), mtf.Dim("width", 2 * width.size)]
    return mtf.reshape(mtf.broadcast(x, more), [b, *sides, c])


cifar10 = partial(
    model,
    batch=128,
    size=32,
    colours=3,
    channels=128,
    widths=(1, 2, 2, 2),
    blocks=2,
    attend=16,
    groups=32,
    dropout=0.1,
)
"""The paper's model of CIFAR-10: 35,746,307 parameters."""


def data(
    batch: int = 16, size: int = 16, colours: int = 1, steps: int = 1000, split: str = "train", **_: object
) -> Iterator[dict[str, np.ndarray]]:
    """Yields digits in [-1, 1], noise and noise steps; every fifth digit is held out."""
    from examples.images import digits

    rng = np.random.default_rng(2)
    for found in digits(batch, size, split):
        image = np.repeat(found["image"] * 2 - 1, colours, -1)
        noise = rng.normal(size=image.shape).astype(np.float32)
        yield {"image": image, "noise": noise, "step": rng.integers(0, steps, batch).astype(np.int32)}
