"""Helpers of convolutions: which dimension plays which part, and arrays in the kernel's order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import Edge, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ops.kinds import listing
from mesh_tf_core.ops.windows import Window, padded, strided


@dataclass(frozen=True)
class Grid:
    """The parts of the dimensions of one convolution.

    Attributes:
      taps: the weights' dimensions that the windows slide over, one per window.
      channel: the dimension of input and weights that the output lacks.
      groups: dimensions of all three: every group has separate weights.
    """

    windows: tuple[Window, ...]
    taps: tuple[str, ...]
    channel: str
    groups: tuple[str, ...] = ()

    def __str__(self) -> str:
        slides = "; ".join(f"{v} ({tap})" for v, tap in zip(self.windows, self.taps, strict=True))
        return f"{slides}; channel {self.channel}{''.join(f'; group {name}' for name in self.groups)}"

    @property
    def names(self) -> tuple[str, ...]:
        """Dimensions that windows slide along."""
        return tuple(v.dim for v in self.windows)

    @property
    def strides(self) -> list[int]:
        return [v.stride for v in self.windows]

    @property
    def dilations(self) -> list[int]:
        return [v.dilation for v in self.windows]

    def outs(self, w: Shape) -> tuple[str, ...]:
        """The weights' dimensions that the output has."""
        return tuple(n for n in w.names if n not in (*self.taps, self.channel, *self.groups))

    def others(self, x: Shape) -> tuple[str, ...]:
        """The input's dimensions that the output has too, groups among them."""
        return tuple(n for n in x.names if n not in self.names and n != self.channel)

    def images_of(self, x: Shape) -> tuple[str, ...]:
        """Those of them that the weights lack."""
        return tuple(n for n in self.others(x) if n not in self.groups)

    def whole_taps(self) -> dict[str, str]:
        return dict.fromkeys(self.taps, "every window needs all of its weights")

    def roles(self, x: TensorType, w: TensorType) -> Roles:
        kept = (*self.others(x.shape), *self.names, *self.outs(w.shape))
        return Roles(parallel=kept, reduced=(self.channel,), whole=self.whole_taps())

    def check(self, op: str, x: TensorType, w: TensorType) -> None:
        """UserError unless the two operands fit."""
        problem = ""
        if x.shape.dim(self.channel) != w.shape.dim(self.channel):
            problem = f"the channel dimension {self.channel!r} must have the same size in both operands"
        for v, tap in zip(self.windows, self.taps, strict=True):
            if w.shape.dim(tap).size != v.size:
                problem = (
                    f"the windows along {v.dim!r} have size {v.size}, but the weights have "
                    f"{w.shape.dim(tap).size} taps; make the sizes equal"
                )
        for name in self.groups:
            if not any(d.name == name and d in x.shape.dims for d in w.shape):
                problem = f"both operands must have the group dimension {name!r} with the same size"
        shared = set(w.shape.names) & set(x.shape.names) - {self.channel, *self.groups}
        if shared:
            problem = (
                f"both operands have the dimensions {', '.join(sorted(shared))}; rename them in one operand, "
                "or list them in `groups`"
            )
        if problem:
            raise UserError(f"{op} of {listing((x, w))}: {problem}")

    def output(self, x: Shape, w: Shape, sizes: dict[str, int]) -> Shape:
        kept = [x.dim(n) for n in self.images_of(x)]
        ends = [w.dim(n) for n in (*self.groups, *self.outs(w))]
        return Shape([*kept, *(Dim(n, sizes[n]) for n in self.names), *ends])

    def weights_per_output(self, w: Shape) -> int:
        return self.count(w, (*self.taps, self.channel))

    def product(self, flops: float, w: Shape) -> tuple[int, int, int, int]:
        """(batch, m, n, k) of the matrix product of all windows and the weights, with the same FLOPs."""
        n, k, batch = self.count(w, self.outs(w)), self.weights_per_output(w), self.count(w, self.groups)
        return batch, max(1, round(flops / (2.0 * n * k * batch))), n, k

    def added(self, flops: float, w: Shape, width: int) -> tuple[int, int]:
        """(rows, width) of the partial results of the taps of such a convolution."""
        batch, places, _, _ = self.product(flops, w)
        return batch * places * self.count(w, self.taps), width

    def sizes(self, x: Shape) -> list[int]:
        return [x.dim(n).size for n in self.names]

    @staticmethod
    def count(shape: Shape, names: Iterable[str]) -> int:
        """Elements over the named dimensions."""
        return math.prod(shape.dim(n).size for n in names)

    def images(self, k: Kernel, x: Any, shape: Shape, last: Sequence[str]) -> Any:
        """x as [others, windows' dims, groups, last], with the others, groups and last ones merged into one
        axis each."""
        images = self.images_of(shape.without(*last))
        x = ordered(k, x, shape, [*images, *self.names, *self.groups, *last])
        ends = [self.count(shape, self.groups), self.count(shape, last)]
        return k.reshape(x, [self.count(shape, images), *self.sizes(shape), *ends])

    def filters(self, k: Kernel, w: Any, shape: Shape, first: Sequence[str], last: Sequence[str]) -> Any:
        """w as [taps, groups, first, last], the dimensions of each of the last three in one axis."""
        w = ordered(k, w, shape, [*self.taps, *self.groups, *first, *last])
        ends = [self.count(shape, part) for part in (self.groups, first, last)]
        return k.reshape(w, [*(shape.dim(t).size for t in self.taps), *ends])

    def restored(self, k: Kernel, y: Any, out: Shape, last: Sequence[str]) -> Any:
        """[others, windows' dims, groups, last] as the output `out`."""
        images = self.images_of(out.without(*last))
        made = Shape(out.dim(n) for n in (*images, *self.names, *self.groups, *last))
        return ordered(k, k.reshape(y, made.sizes), made, out.names)


def correlated(
    k: Kernel, x: Any, w: Any, strides: Sequence[int], dilations: Sequence[int], edges: Sequence[Edge]
) -> Any:
    """Correlation of x [n, windows' dims, g, c], padded by `edges`, with w [taps, g, c, o], group by group:
    [n, windows' dims, g, o].

    Groups are products tap by tap; without them it is the library's convolution.
    """
    rank, groups = len(strides), w.shape[-3]
    if groups == 1:
        x = k.reshape(x, [*x.shape[:-2], x.shape[-1]])
        w = k.reshape(w, [*w.shape[:-3], *w.shape[-2:]])
        y = k.padded_conv(x, w, strides, dilations, edges)
        if y is None:
            y = k.conv(padded(k, x, edges), w, strides, dilations)
        return k.reshape(y, [*y.shape[:-1], 1, y.shape[-1]])
    x = padded(k, x, edges)
    reach = [(n - 1) * d + 1 for n, d in zip(w.shape, dilations, strict=False)]
    counts = [(n - r) // s + 1 for n, r, s in zip(x.shape[1:], reach, strides, strict=False)]
    total = None
    for tap, part in _taps(k, x, w.shape[:rank], counts, strides, dilations):
        own = k.slice(w, [*tap, 0, 0, 0], [*([1] * rank), *w.shape[rank:]])
        own = k.reshape(own, w.shape[rank:])
        if w.shape[-2] == 1:
            term = k.binary("mul", part, k.reshape(own, [groups, w.shape[-1]]))
        else:
            rows = k.reshape(part, [math.prod(part.shape[:-2]), *part.shape[-2:]])
            term = k.reshape(k.einsum("ngc,gco->ngo", rows, own), [*part.shape[:-1], w.shape[-1]])
        total = term if total is None else k.binary("add", total, term)
    return total


def taps_met(
    k: Kernel,
    x: Any,
    dy: Any,
    taps: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    edges: Sequence[Edge],
) -> Any:
    """For every tap the inputs x [n, windows' dims, g, c], padded by `edges`, times their outputs dy [n,
    windows' dims, g, o]: [taps, g, c, o]."""
    rank, (g, c), o = len(strides), x.shape[-2:], dy.shape[-1]
    if g == 1:
        # Channels take the place of images and images that of channels; windows step over taps.
        turned = k.transpose(x, [rank + 2, *range(1, rank + 1), rank + 1, 0])
        dw = correlated(k, turned, _as_filters(k, dy), dilations, strides, edges)
        return k.transpose(dw, [*range(1, rank + 1), rank + 1, 0, rank + 2])
    x = padded(k, x, edges)
    rows = k.reshape(dy, [math.prod(dy.shape[:-2]), g, o])
    met = []
    for _, part in _taps(k, x, taps, dy.shape[1 : rank + 1], strides, dilations):
        inputs = k.reshape(part, [rows.shape[0], g, c])
        met.append(k.reshape(k.einsum("ngc,ngo->gco", inputs, rows), [1, g, c, o]))
    return k.reshape(k.concat(met, 0), [*taps, g, c, o])


def _as_filters(k: Kernel, dy: Any) -> Any:
    """[n, windows' dims, 1, o] as weights [windows' dims, 1, n, o]."""
    rank = len(dy.shape) - 3
    return k.transpose(dy, [*range(1, rank + 1), rank + 1, 0, rank + 2])


def _taps(
    k: Kernel, x: Any, taps: Sequence[int], counts: Sequence[int], strides: Sequence[int], gaps: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Every tap, and the inputs that it meets in all windows."""
    for tap in itertools.product(*map(range, taps)):
        part = x
        for i, (at, count) in enumerate(zip(tap, counts, strict=True)):
            part = strided(k, part, 1 + i, at * gaps[i], count, strides[i])
        yield tap, part


def ordered(k: Kernel, x: Any, shape: Shape, names: Sequence[str]) -> Any:
    """x with its axes in the order of `names`."""
    order = [shape.index(n) for n in names]
    return k.transpose(x, order) if order != list(range(len(order))) else x


def finish(low: Emitter, op: Op, inputs: Sequence[int], type: TensorType, spatial: int) -> int:
    """Emits `op` on inputs with complete windows; sums its partial results.

    Args:
      spatial: the input whose dimensions decide which of them are still split.
    """
    values = [low.values[i] for i in inputs]
    roles = op.roles(*[TensorType(v.shape, v.dtype) for v in values])
    low.check_disjoint(op, (*roles.parallel, *roles.reduced))
    split = {n: a for v in values for n, a in zip(v.shape.names, v.splits, strict=True)}
    natural = dict(zip(type.shape.names, low.natural(type.shape), strict=True))
    kept = dict(zip(low.values[spatial].shape.names, low.values[spatial].splits, strict=True))
    splits = tuple(() if n in roles.whole else kept.get(n, natural[n]) for n in type.shape.names)
    partial = low.oracle.ordered(a for n in roles.reduced for a in split.get(n, ()))
    (out,) = low.local(op, inputs, [type], [splits], [partial])
    return low.joined(out, partial, "sum") if partial else out
