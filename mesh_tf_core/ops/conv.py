"""Convolution along one to three dimensions, with stride, dilation and padding, also transposed.

A split spatial dimension stays split where its input and output are cut at the same places (the input has
stride times as many elements): devices send each other the borders that windows reach over, however many
pieces away (spatial partitioning: Kumar et al. 2021, "Exploring the limits of concurrency in ML training on
Google TPUs", section 3.1). Elsewhere the dimension is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Edge, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType, Work
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.convgrid import Grid, correlated, finish, ordered, taps_met
from mesh_tf_core.ops.kinds import FirstDerivative, listing, same_dtype
from mesh_tf_core.ops.pieces import window
from mesh_tf_core.ops.shape import reshape
from mesh_tf_core.ops.windows import Pads, Window, windows


@dataclass(frozen=True)
class Conv(Op):
    """x [others, windows' dims, channel] correlated with w [taps, channel, out]: [others, windows' dims,
    out].

    Attributes:
      base: per window, the input at which this device's piece of x begins, relative to its piece of the
        whole.
    """

    grid: Grid
    base: tuple[int, ...] | None = None
    kind: ClassVar[str] = "matmul"

    def roles(self, *inputs: TensorType) -> Roles:
        return self.grid.roles(*inputs)

    def infer(self, *inputs: TensorType) -> TensorType:
        x, w = inputs
        self.grid.check("conv", x, w)
        sizes = {v.dim: v.outputs(x.shape.dim(v.dim).size) for v in self.grid.windows}
        return TensorType(self.grid.output(x.shape, w.shape, sizes), same_dtype("conv", inputs))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (x, w), (xs, ws), grid = slices, (t.shape for t in at.inputs), self.grid
        out, outs = at.outputs[0].shape, grid.outs(ws)
        x = grid.images(k, x, xs, [grid.channel])
        w = grid.filters(k, w, ws, [grid.channel], outs)
        edges = _edges(grid.windows, self.base, out)
        y = correlated(k, x, w, grid.strides, grid.dilations, edges)
        return grid.restored(k, y, out, outs)

    def flops(self, *local: TensorType) -> float:
        x, w = local
        sizes = {v.dim: max(1, x.shape.dim(v.dim).size // v.stride) for v in self.grid.windows}
        return 2.0 * self.grid.output(x.shape, w.shape, sizes).size * self.grid.weights_per_output(w.shape)

    def work(self, *local: TensorType) -> Work:
        """Every output is the product of a window's inputs and the weights."""
        w, flops = local[1].shape, self.flops(*local)
        added = self.grid.added(flops, w, self.grid.count(w, self.grid.outs(w)))
        return Work(self.grid.product(flops, w), added=added)

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        w = low.without(inputs[1], self.grid.taps)
        x, base, _ = _reached(low, inputs[0], self.grid, _sizes(self.grid, types[0].shape))
        return [finish(low, replace(self, base=base), [x, w], types[0], x)]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        x, w = inputs
        back = ConvInputGrad(self.grid, _sizes(self.grid, x.shape))
        weight = ConvFilterGrad(self.grid, w.shape)
        return dy.graph.apply(back, dy, w), dy.graph.apply(weight, x, dy)


@dataclass(frozen=True)
class ConvInputGrad(Op):
    """dy [others, windows' dims, out] distributed back to its inputs: [others, windows' dims, channel].

    Attributes:
      sizes: of the inputs, per window.
      base: per window, the output at which this device's piece of dy begins, relative to its piece of the
        whole.
    """

    grid: Grid
    sizes: tuple[int, ...]
    base: tuple[int, ...] | None = None
    kind: ClassVar[str] = "matmul"

    def roles(self, *inputs: TensorType) -> Roles:
        dy, w = inputs
        grid = self.grid
        outs = grid.outs(w.shape)
        kept = tuple(n for n in dy.shape.names if n not in outs)
        return Roles(parallel=(*kept, grid.channel), reduced=outs, whole=grid.whole_taps())

    def infer(self, *inputs: TensorType) -> TensorType:
        dy, w = inputs
        outs = self.grid.outs(w.shape)
        for name in (*outs, *(v.dim for v in self.grid.windows)):
            dy.shape.index(name)
        for v, size in zip(self.grid.windows, self.sizes, strict=True):
            if v.outputs(size) != dy.shape.dim(v.dim).size:
                raise UserError(
                    f"transposed conv of {listing(inputs)}: a size of {size} for {v.dim!r} needs "
                    f"{v.outputs(size)} windows in the input, found {dy.shape.dim(v.dim).size}"
                )
        others = [dy.shape.dim(n) for n in self.grid.images_of(dy.shape.without(*outs))]
        spatial = [Dim(v.dim, s) for v, s in zip(self.grid.windows, self.sizes, strict=True)]
        ends = [w.shape.dim(n) for n in (*self.grid.groups, self.grid.channel)]
        return TensorType(Shape([*others, *spatial, *ends]), same_dtype("conv", inputs))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (dy, w), (ds, ws), grid = slices, (t.shape for t in at.inputs), self.grid
        out, outs = at.outputs[0].shape, grid.outs(ws)
        dy = grid.images(k, dy, ds, outs)
        edges = []
        for v, base in zip(grid.windows, self.base or [0] * len(grid.windows), strict=True):
            before = v.reach - 1 - v.before + base * v.stride
            edges.append(Edge(v.stride, before, out.dim(v.dim).size + v.reach - 1))
        w = grid.filters(k, w, ws, outs, [grid.channel])
        for i in range(len(grid.windows)):
            w = k.flip(w, i)
        dx = correlated(k, dy, w, [1] * len(grid.windows), grid.dilations, edges)
        return grid.restored(k, dx, out, [grid.channel])

    def flops(self, *local: TensorType) -> float:
        dy, w = local
        return 2.0 * dy.shape.size * self.grid.weights_per_output(w.shape)

    def work(self, *local: TensorType) -> Work:
        """Every output's row of gradients times the weights, transposed."""
        w, flops = local[1].shape, self.flops(*local)
        batch, m, n, k = self.grid.product(flops, w)
        return Work((batch, m, k, n), added=self.grid.added(flops, w, w.dim(self.grid.channel).size))

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        w = low.without(inputs[1], self.grid.taps)
        dy, base, _ = _reached(low, inputs[0], self.grid, self.sizes, back=True)
        return [finish(low, replace(self, base=base), [dy, w], types[0], dy)]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        y, w = inputs
        forward = Conv(self.grid)
        weight = ConvFilterGrad(self.grid, w.shape)
        return dy.graph.apply(forward, dy, w), dy.graph.apply(weight, dy, y)


@dataclass(frozen=True)
class ConvFilterGrad(FirstDerivative):
    """The gradient of the weights [filters] from (x, dy): every tap's inputs times their outputs.

    Attributes:
      base: as of `Conv`.
    """

    grid: Grid
    filters: Shape
    base: tuple[int, ...] | None = None
    kind: ClassVar[str] = "matmul"
    of: ClassVar[str] = "conv with respect to its weights"

    def roles(self, *inputs: TensorType) -> Roles:
        summed = tuple(n for n in inputs[0].shape.names if n not in (self.grid.channel, *self.grid.groups))
        return Roles(
            parallel=(self.grid.channel, *self.grid.groups, *self.grid.outs(self.filters)),
            reduced=summed,
            whole=self.grid.whole_taps(),
        )

    def infer(self, *inputs: TensorType) -> TensorType:
        return TensorType(self.filters, same_dtype("conv", inputs))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (x, dy), (xs, ds), grid = slices, (t.shape for t in at.inputs), self.grid
        out, outs = at.outputs[0].shape, grid.outs(self.filters)
        images = list(grid.images_of(xs))
        x = grid.images(k, x, xs, [grid.channel])
        # The images of both in the same order.
        same = Shape(ds.dim(n) for n in (*images, *grid.names, *grid.groups, *outs))
        dy = grid.images(k, ordered(k, dy, ds, same.names), same, outs)
        taps, edges = [out.dim(t).size for t in grid.taps], _edges(grid.windows, self.base, ds)
        dw = taps_met(k, x, dy, taps, grid.strides, grid.dilations, edges)
        made = Shape(out.dim(n) for n in (*grid.taps, *grid.groups, grid.channel, *outs))
        return ordered(k, k.reshape(dw, made.sizes), made, out.names)

    def flops(self, *local: TensorType) -> float:
        x, dy = local
        taps = self.grid.count(self.filters, self.grid.taps)
        return 2.0 * dy.shape.size * taps * x.shape.dim(self.grid.channel).size

    def work(self, *local: TensorType) -> Work:
        """Windows' inputs, transposed, times their outputs."""
        x, dy = local
        outs = [name for name in dy.shape.names if name in self.grid.outs(self.filters)]
        n, batch = self.grid.count(dy.shape, outs), self.grid.count(dy.shape, self.grid.groups)
        weights = self.grid.count(self.filters, self.grid.taps) * x.shape.dim(self.grid.channel).size
        places = dy.shape.size // (n * batch)
        added = batch * places * self.grid.count(self.filters, self.grid.taps), n
        return Work((batch, weights, n, places), added=added)

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        dy = inputs[1]
        x, base, gathered = _reached(low, inputs[0], self.grid, _sizes(self.grid, low.values[dy].shape))
        for name in gathered:
            dy = low.without(dy, [name])
        return [finish(low, replace(self, base=base), [x, dy], types[0], x)]


def _sizes(grid: Grid, shape: Shape) -> tuple[int, ...]:
    """Of the windows' dimensions."""
    return tuple(shape.dim(v.dim).size for v in grid.windows)


def _reached(
    low: Emitter, id: int, grid: Grid, others: Sequence[int], back: bool = False
) -> tuple[int, tuple[int, ...], list[str]]:
    """The inputs that the windows of each device's outputs reach, where its piece of them begins, and the
    dimensions that had to be gathered.

    Args:
      others: sizes of the outputs.
      back: of the outputs, those whose windows reach each device's inputs; `others` are sizes of the inputs.
    """
    base, gathered = [], []
    for v, other in zip(grid.windows, others, strict=True):
        own, count = low.values[id].shape.dim(v.dim).size, low.oracle.ways(low.values[id].split_of(v.dim))
        begin, end = (v.outputs_of if back else v.inputs_of)(0, other // count)
        if count > 1 and v.split_alike(*((other, own) if back else (own, other)), count):
            id = window(low, id, v.dim, begin, end)
        else:
            id, begin = low.without(id, [v.dim]), 0
            gathered.append(v.dim)
        base.append(begin)
    return id, tuple(base), gathered


def _edges(windows: Sequence[Window], base: Sequence[int] | None, outputs: Shape) -> list[Edge]:
    """How inputs are padded for the windows of some outputs, whose piece begins at `base`."""
    return [
        Edge(1, v.before + begin, (outputs.dim(v.dim).size - 1) * v.stride + v.reach)
        for v, begin in zip(windows, base or [0] * len(windows), strict=True)
    ]


_SINGLE = Dim("_single", 1)


def _grid(found: tuple[Window, ...], taps: Sequence[Dim], channel: Dim, groups: Sequence[Dim]) -> Grid:
    return Grid(found, tuple(t.name for t in taps), channel.name, tuple(g.name for g in groups))


def conv(
    x: Tensor,
    w: Tensor,
    dims: Sequence[Dim],
    taps: Sequence[Dim],
    channel: Dim | None,
    strides: int | Sequence[int] = 1,
    dilations: int | Sequence[int] = 1,
    pads: Pads = "same",
    groups: Sequence[Dim] = (),
) -> Tensor:
    """Correlation of x [others, dims, groups, channel] with w [taps, groups, channel, out]: [others, dims,
    groups, out].

    Args:
      dims: one to three dimensions of x that windows slide along; they keep their names.
      taps: the dimensions of w that belong to them, in the same order.
      channel: summed out; None if nothing is (with groups: a depthwise convolution).
      pads: `same`, `valid`, or (before, after) per dimension.
      groups: dimensions of x and of w, which the output keeps: each of their elements is convolved with
        separate weights.
    """
    own = [x.shape.dim(d.name) for d in dims]
    found = windows(own, [t.size for t in taps], strides, dilations, pads)
    if channel is None:
        channel = _SINGLE
        x, w = reshape(x, [*x.shape, _SINGLE]), reshape(w, [*w.shape, _SINGLE])
    op = Conv(_grid(found, taps, channel, groups))
    return x.graph.apply(op, x, w)


def conv_transpose(
    y: Tensor,
    w: Tensor,
    dims: Sequence[Dim],
    taps: Sequence[Dim],
    channel: Dim | None,
    strides: int | Sequence[int] = 1,
    dilations: int | Sequence[int] = 1,
    pads: Pads = "same",
    groups: Sequence[Dim] = (),
) -> Tensor:
    """The transpose of `conv`: y [others, dims, out] to [others, dims, channel], `strides` times as large.

    Args:
      dims: the dimensions with the sizes of the result; y has the sizes that `conv` would give.
      channel, groups: as of `conv`.
    """
    found = windows(dims, [t.size for t in taps], strides, dilations, pads)
    inner = channel or _SINGLE
    w = w if channel else reshape(w, [*w.shape, _SINGLE])
    op = ConvInputGrad(_grid(found, taps, inner, groups), tuple(d.size for d in dims))
    x = y.graph.apply(op, y, w)
    return x if channel else reshape(x, x.shape.without(_SINGLE.name))
