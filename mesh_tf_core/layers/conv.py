"""Convolutions and the normalisation of images and volumes, along dimensions that may be split."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ONES, ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import activation
from mesh_tf_core.layers.dense import Dense
from mesh_tf_core.ops.conv import conv, conv_transpose
from mesh_tf_core.ops.math import rsqrt, square
from mesh_tf_core.ops.reduce import reduce_mean
from mesh_tf_core.ops.shape import rename, reshape
from mesh_tf_core.ops.windows import Pads


@dataclass(frozen=True)
class Conv:
    """Convolution in one to three dimensions, with `same` padding.

    Input channels of the outputs' name are called `<name>_in` while they are summed out, so that a layout may
    split the weight's inputs and outputs differently. A split spatial dimension stays split: neighbours
    exchange their borders (spatial partitioning, as in `mtf.conv`).

    Attributes:
      outputs: channels of the output.
      dims: names of the spatial dimensions.
      size: taps along each of them.
      stride: the output has that many times fewer elements along each; `transposed`: more.
      bias: adds a learned [outputs].
      causal: along its one dimension an output sees no later inputs.
      even: as many elements of padding before as behind, as in PyTorch, also where a stride needs fewer.
      activation: name of a function (`layers.ACTIVATIONS`).
      inputs: name of the input's channels; by default that of the outputs.
    """

    outputs: Dim
    dims: tuple[str, ...]
    size: int = 3
    stride: int = 1
    transposed: bool = False
    bias: bool = False
    causal: bool = False
    even: bool = False
    activation: str = "linear"
    inputs: str = ""
    name: str = "conv"

    def __post_init__(self) -> None:
        if not 1 <= len(self.dims) <= 3:
            raise UserError(f"Conv: `dims` must name 1 to 3 spatial dimensions, found {list(self.dims)}")
        if self.causal and (len(self.dims) > 1 or self.transposed):
            raise UserError("Conv: causal=True needs exactly one spatial dimension and transposed=False")
        activation(self.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """[others, dims, channels] -> [others, dims, outputs]."""
        g, own = x.graph, self.inputs or self.outputs.name
        if own == self.outputs.name:
            own = f"{own}_in"
            x = rename(x, **{self.outputs.name: own})
        inner = x.dim(own)
        taps = [Dim(f"tap_{d}", self.size) for d in self.dims]
        fan_in = inner.size * self.size ** len(self.dims)
        with g.scope(self.name):
            stddev = Normal(math.sqrt(2 / fan_in))  # He et al. 2015, "Delving deep into rectifiers"
            w = g.variable("weight", [*taps, inner, self.outputs], stddev, activation_dtype=x.dtype)
            if self.transposed:
                dims = [Dim(d, x.dim(d).size * self.stride) for d in self.dims]
                y = conv_transpose(x, w, dims, taps, self.outputs, self.stride)
            else:
                pads: Pads = [(self.size - 1, 0)] if self.causal else "same"
                pads = [(self.size // 2, self.size // 2) for _ in taps] if self.even else pads
                y = conv(x, w, [x.dim(d) for d in self.dims], taps, inner, self.stride, pads=pads)
            if self.bias:
                y = y + g.variable("bias", [self.outputs], ZEROS, activation_dtype=x.dtype)
            return activation(self.activation)(y)


@dataclass(frozen=True)
class DepthwiseConv:
    """Convolves every channel with a separate filter, with `same` padding.

    Attributes:
      dims, size, stride, bias: as of `Conv`.
    """

    dims: tuple[str, ...]
    size: int = 3
    stride: int = 1
    bias: bool = False
    channels: str = "channels"
    name: str = "depthwise"

    def __post_init__(self) -> None:
        if not 1 <= len(self.dims) <= 3:
            raise UserError(
                f"DepthwiseConv: `dims` must name 1 to 3 spatial dimensions, found {list(self.dims)}"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """[others, dims, channels] -> the same."""
        g, c = x.graph, x.dim(self.channels)
        taps = [Dim(f"tap_{d}", self.size) for d in self.dims]
        with g.scope(self.name):
            stddev = Normal(math.sqrt(2 / self.size ** len(self.dims)))
            w = g.variable("weight", [*taps, c], stddev, activation_dtype=x.dtype)
            y = conv(x, w, [x.dim(d) for d in self.dims], taps, None, self.stride, groups=[c])
            return y + g.variable("bias", [c], ZEROS, activation_dtype=x.dtype) if self.bias else y


@dataclass(frozen=True)
class SeparableConv:
    """A depthwise convolution, then a product over the channels: a convolution with far fewer weights
    (Chollet 2017, "Xception: deep learning with depthwise separable convolutions").

    Attributes:
      outputs: channels of the output.
      dims, size, stride, bias, inputs: as of `Conv`.
    """

    outputs: Dim
    dims: tuple[str, ...]
    size: int = 3
    stride: int = 1
    bias: bool = False
    inputs: str = ""
    name: str = "separable"

    def __call__(self, x: Tensor) -> Tensor:
        """[others, dims, channels] -> [others, dims, outputs]."""
        own = self.inputs or self.outputs.name
        with x.graph.scope(self.name):
            y = DepthwiseConv(self.dims, self.size, self.stride, channels=own)(x)
            if own == self.outputs.name:
                own = f"{own}_in"
                y = rename(y, **{self.outputs.name: own})
            return Dense((self.outputs,), (own,), self.bias, name="pointwise")(y)


@dataclass(frozen=True)
class GroupNorm:
    """Mean 0 and variance 1 of every example's groups of channels over all places, times a learned scale plus
    a learned bias (Wu & He 2018). Unlike batch normalisation it is the same for any number of microbatches.

    Attributes:
      dims: names of the spatial dimensions.
      groups: number of groups of channels; a divisor of the number of channels.
    """

    dims: tuple[str, ...]
    groups: int = 1
    channels: str = "channels"
    epsilon: float = 1e-5
    name: str = "norm"

    def __call__(self, x: Tensor) -> Tensor:
        """Same dimensions as x [others, dims, channels]."""
        g, c = x.graph, x.dim(self.channels)
        if self.groups < 1 or c.size % self.groups:
            raise UserError(f"GroupNorm: groups={self.groups} must divide the size of {c.name!r}, {c.size}")
        inner = Dim(f"{c.name}_of_group", c.size // self.groups)
        groups = Dim(f"{c.name}_groups", self.groups)
        at = x.shape.index(c.name)
        apart = reshape(x, Shape([*x.shape.dims[:at], groups, inner, *x.shape.dims[at + 1 :]]))
        over = [*self.dims, inner.name]
        centred = apart - reduce_mean(apart, over)
        y = reshape(centred * rsqrt(reduce_mean(square(centred), over) + self.epsilon), x.shape)
        with g.scope(self.name):
            scale = g.variable("scale", [c], ONES, activation_dtype=x.dtype)
            return y * scale + g.variable("bias", [c], ZEROS, activation_dtype=x.dtype)
