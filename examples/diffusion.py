"""A diffusion model's U-Net (Ho et al. 2020, "Denoising diffusion probabilistic models") on digits.

    layoutopt search examples/diffusion.py:cifar10 --devices 8 --hardware tpu-v4
    layoutopt train examples/diffusion.py --layout "batch:data;height:rows" --mesh "data:2;rows:2" --steps 200

Splitting `height` or `width` is spatial partitioning: neighbours exchange the rows that windows reach over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

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
    """Builds the model, which finds the noise that was added to an image.

    Args:
      size: pixels along a side, a multiple of 8.
      channels: at full resolution; `widths`: how many times as many on each level, each half
        as large as the one before.
      blocks: of two convolutions each, on each level of the way down, and one more on the way up.
      attend: resolution (pixels along a side) at which places attend to each other.
      groups: of channels that are normalised together.
      steps: of noise; the input `step` says how many an image has had.
    """
    g, b = mtf.Graph("diffusion"), mtf.Dim("batch", batch)
    shape = [b, mtf.Dim("height", size), mtf.Dim("width", size), mtf.Dim("colours", colours)]
    image, noise = (g.input(name, shape, "float32") for name in ("image", "noise"))
    step = g.input("step", [b])
    at = mtf.Dim("steps", steps)
    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, steps))
    clean, noisy = (
        mtf.gather(mtf.constant(g, t.astype(np.float32), [at]), step, at)
        for t in (kept**0.5, (1 - kept) ** 0.5)
    )
    x = (image * clean + noise * noisy).cast(training.dtype)

    def conv(x: mtf.Tensor, width: int, name: str, **fields: object) -> mtf.Tensor:
        return nn.Conv(mtf.Dim("channels", width), PLANE, bias=True, name=name, **fields)(x)  # type: ignore[arg-type]

    def norm(x: mtf.Tensor, name: str) -> mtf.Tensor:
        return nn.GroupNorm(PLANE, groups, name=name, epsilon=1e-6)(x)

    def block(x: mtf.Tensor, width: int) -> mtf.Tensor:
        y = conv(mtf.silu(norm(x, "norm_1")), width, "conv_1")
        y = y + nn.Dense((y.dim("channels"),), ("d_time",), True, name="time")(mtf.silu(time))
        y = conv(mtf.dropout(mtf.silu(norm(y, "norm_2")), dropout), width, "conv_2")
        return y + (x if x.dim("channels").size == width else conv(x, width, "shortcut", size=1))

    def attended(x: mtf.Tensor) -> mtf.Tensor:
        """Every place of x [batch, height, width, channels] sees all others."""
        c = x.dim("channels")
        flat = [b, mtf.Dim("length", x.dim("height").size * x.dim("width").size), c]
        one = nn.Attention(mtf.Dim("heads", 1), mtf.Dim("d_kv", c.size), biases="all", d_model="channels")
        return x + mtf.reshape(one(mtf.reshape(norm(x, "attention_norm"), flat)), x.shape)

    def stage(x: mtf.Tensor, width: int, name: str) -> mtf.Tensor:
        with g.scope(name):
            x = block(x, width)
            return attended(x) if x.dim("height").size == attend else x

    d_time = mtf.Dim("d_time", 4 * channels)
    with g.scope("time"):
        inner = nn.Dense((d_time,), ("channels",), True, "silu", "first")(
            waves(step, channels).cast(training.dtype)
        )
        time = nn.Dense((d_time,), ("d_inner",), True, name="second")(mtf.rename(inner, d_time="d_inner"))
    x = conv(x, channels, "stem", inputs="colours")
    kept_ones = [x]
    for level, times in enumerate(widths):
        for i in range(blocks):
            x = stage(x, channels * times, f"down_{level}_{i}")
            kept_ones.append(x)
        if level < len(widths) - 1:
            x = conv(x, channels * times, f"half_{level}", stride=2)
            kept_ones.append(x)
    with g.scope("middle"):
        width = channels * widths[-1]
        with g.scope("first"):
            x = attended(block(x, width))
        with g.scope("second"):
            x = block(x, width)
    for level, times in reversed(list(enumerate(widths))):
        for i in range(blocks + 1):
            x = stage(mtf.concat([x, kept_ones.pop()], "channels"), channels * times, f"up_{level}_{i}")
        if level:
            x = conv(doubled(x), channels * times, f"double_{level}")
    x = mtf.silu(norm(x, "final_norm"))
    found = nn.Conv(shape[-1], PLANE, bias=True, inputs="channels", name="output")(x)
    return training.model(mtf.reduce_mean(mtf.square(found.cast("float32") - noise)), "diffusion")


def waves(step: mtf.Tensor, channels: int) -> mtf.Tensor:
    """[batch, channels]: sines, then cosines, of the step in wavelengths from 2 pi to 20,000 pi."""
    half = channels // 2
    rates = np.exp(np.arange(half) * (-math.log(10000) / (half - 1))).astype(np.float32)
    angle = step.cast("float32") * mtf.constant(step.graph, rates, [mtf.Dim("channels", half)])
    return mtf.concat([mtf.sin(angle), mtf.cos(angle)], "channels")


def doubled(x: mtf.Tensor) -> mtf.Tensor:
    """Every place of x [batch, height, width, channels] four times."""
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
    """Digits from -1 to 1, noise for each, and after how many steps of it; every fifth digit is held out."""
    from examples.images import digits

    rng = np.random.default_rng(2)
    for found in digits(batch, size, split):
        image = np.repeat(found["image"] * 2 - 1, colours, -1)
        noise = rng.normal(size=image.shape).astype(np.float32)
        yield {"image": image, "noise": noise, "step": rng.integers(0, steps, batch).astype(np.int32)}
