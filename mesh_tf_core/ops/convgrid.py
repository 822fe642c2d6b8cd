"""What the operations of convolution share: which dimension plays which part, and arrays in the kernel's
order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_tf_core.dims import Dim, Shape
from mesh_tf_core.errors import UserError
from mesh_tf_core.kernels.protocol import Kernel
from mesh_tf_core.layout import check_disjoint
from mesh_tf_core.op import Op, Roles, TensorType
from mesh_tf_core.ops.common import listing
from mesh_tf_core.ops.windows import Window
from mesh_tf_core.program import Local

if TYPE_CHECKING:
    from mesh_tf_core.lower.base import Lowering


@dataclass(frozen=True)
class Grid:
    """The parts of the dimensions of one convolution."""

    windows: tuple[Window, ...]
    taps: tuple[str, ...]
    channel: str

    @property
    def names(self) -> tuple[str, ...]:
        """Dimensions that windows slide along."""
        return tuple(v.dim for v in self.windows)

    def outs(self, w: Shape) -> tuple[str, ...]:
        """The weights' dimensions that the output has."""
        return tuple(n for n in w.names if n not in self.taps and n != self.channel)

    def others(self, x: Shape) -> tuple[str, ...]:
        """The input's dimensions that nothing happens to."""
        return tuple(n for n in x.names if n not in self.names and n != self.channel)

    def whole_taps(self) -> dict[str, str]:
        return dict.fromkeys(self.taps, "every window needs all of its weights")

    def roles(self, x: TensorType, w: TensorType) -> Roles:
        kept = (*self.others(x.shape), *self.names, *self.outs(w.shape))
        return Roles(parallel=kept, reduced=(self.channel,), whole=self.whole_taps())

    def check(self, op: str, x: TensorType, w: TensorType) -> None:
        """UserError unless the two operands fit."""
        problem = ""
        if x.shape.dim(self.channel) != w.shape.dim(self.channel):
            problem = f"the channel {self.channel!r} must be the same in both"
        for v, tap in zip(self.windows, self.taps, strict=True):
            if w.shape.dim(tap).size != v.size:
                problem = (
                    f"the windows along {v.dim!r} have {v.size} taps, the weights {w.shape.dim(tap).size}"
                )
        shared = set(w.shape.names) & set(x.shape.names) - {self.channel}
        if shared:
            problem = f"both have {', '.join(sorted(shared))}; rename it in one of them"
        if problem:
            raise UserError(f"{op} of {listing((x, w))}: {problem}")

    def output(self, x: Shape, w: Shape, sizes: dict[str, int]) -> Shape:
        kept = [x.dim(n) for n in self.others(x)]
        return Shape([*kept, *(Dim(n, sizes[n]) for n in self.names), *(w.dim(n) for n in self.outs(w))])

    def weights_per_output(self, w: Shape) -> int:
        return self.count(w, (*self.taps, self.channel))

    def product(self, flops: float, w: Shape) -> tuple[int, int, int, int]:
        """(batch, m, n, k) of the matrix product of all windows and the weights, that has so many FLOPs."""
        n, k = self.count(w, self.outs(w)), self.weights_per_output(w)
        return 1, max(1, round(flops / (2.0 * n * k))), n, k

    def sizes(self, x: Shape) -> list[int]:
        return [x.dim(n).size for n in self.names]

    @staticmethod
    def count(shape: Shape, names: Iterable[str]) -> int:
        """Elements over the named dimensions."""
        return math.prod(shape.dim(n).size for n in names)

    def images(self, k: Kernel, x: Any, shape: Shape) -> Any:
        """x as [others, windows' dims, channel] with the others in one axis."""
        others = self.others(shape)
        x = ordered(k, x, shape, [*others, *self.names, self.channel])
        return k.reshape(x, [self.count(shape, others), *self.sizes(shape), shape.dim(self.channel).size])

    def filters(self, k: Kernel, w: Any, shape: Shape) -> Any:
        """w as [taps, channel, out] with the outs in one axis."""
        outs = self.outs(shape)
        w = ordered(k, w, shape, [*self.taps, self.channel, *outs])
        taps = [shape.dim(t).size for t in self.taps]
        return k.reshape(w, [*taps, shape.dim(self.channel).size, self.count(shape, outs)])


def ordered(k: Kernel, x: Any, shape: Shape, names: Sequence[str]) -> Any:
    """x with its axes in the order of `names`."""
    order = [shape.index(n) for n in names]
    return k.transpose(x, order) if order != list(range(len(order))) else x


def finish(low: Lowering, op: Op, inputs: Sequence[int], type: TensorType, spatial: int) -> int:
    """Emits `op` on inputs whose windows are in place; sums what it leaves partial.

    Args:
      spatial: the input whose dimensions say which of them are still split.
    """
    values = [low.values[i] for i in inputs]
    roles = op.roles(*(TensorType(v.shape, v.dtype) for v in values))
    check_disjoint({n: low.layout.axes(n) for n in (*roles.parallel, *roles.reduced)}, op.name)
    split = {n: a for v in values for n, a in zip(v.shape.names, v.splits, strict=True)}
    natural = dict(zip(type.shape.names, low.natural(type.shape), strict=True))
    kept = dict(zip(low.values[spatial].shape.names, low.values[spatial].splits, strict=True))
    splits = tuple(() if n in roles.whole else kept.get(n, natural[n]) for n in type.shape.names)
    partial = tuple(a for a in low.mesh.names if any(a in split.get(n, ()) for n in roles.reduced))
    out = low.new(type, splits, partial)
    low.emit(Local(tuple(inputs), (out,), low.origin, op))
    return low.joined(out, partial, "sum") if partial else out
