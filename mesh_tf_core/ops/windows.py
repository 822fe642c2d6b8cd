"""The geometry of windows that slide along dimensions, and the array functions that convolution and pooling
share.

Along one dimension, output o looks at inputs o * stride - before + t * dilation, t = 0 .. size-1; positions
outside of the input are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.kernel import Edge, Kernel


@dataclass(frozen=True)
class Window:
    """A window along one dimension.

    Attributes:
      before, after: elements of padding at the two ends.
    """

    dim: str
    size: int
    stride: int
    dilation: int
    before: int
    after: int

    def __post_init__(self) -> None:
        if min(self.size, self.stride, self.dilation) < 1 or min(self.before, self.after) < 0:
            raise UserError(
                f"window along {self.dim!r}: size, stride and dilation must be positive and padding at "
                f"least 0, found {self}"
            )

    def __str__(self) -> str:
        pads = f"{self.before}, {self.after}"
        return f"{self.dim}: {self.size} by {self.stride} dilated {self.dilation} padded {pads}"

    @property
    def reach(self) -> int:
        """Inputs between the first and the last that an output looks at, both included."""
        return (self.size - 1) * self.dilation + 1

    def outputs(self, inputs: int) -> int:
        """Number of outputs."""
        count = (inputs + self.before + self.after - self.reach) // self.stride + 1
        if count < 1:
            raise UserError(
                f"window along {self.dim!r} spans {self.reach} elements ({self}), but the input has {inputs} "
                f"and padding adds {self.before + self.after}; use a smaller window or more padding"
            )
        return count

    def inputs_of(self, first: int, last: int) -> tuple[int, int]:
        """The inputs (begin, end) that outputs first .. last-1 look at, padding included."""
        return first * self.stride - self.before, (last - 1) * self.stride - self.before + self.reach

    def outputs_of(self, first: int, last: int) -> tuple[int, int]:
        """The outputs (begin, end) that look at any of the inputs first .. last-1, were there no ends."""
        return -(-(first + self.before - self.reach + 1) // self.stride), (
            last - 1 + self.before
        ) // self.stride + 1

    def split_alike(self, inputs: int, outputs: int, ways: int) -> bool:
        """True if cutting inputs and outputs into `ways` pieces cuts them at the same places."""
        return inputs % ways == 0 and outputs % ways == 0 and inputs == outputs * self.stride


def padding(kind: str, size: int, stride: int, dilation: int, inputs: int) -> tuple[int, int]:
    """Padding before and after: `same` gives ceil(inputs / stride) outputs, `valid` has none (TensorFlow's
    rules)."""
    if kind.lower() == "valid":
        return 0, 0
    if kind.lower() != "same":
        raise UserError(f"padding {kind!r}: use 'same', 'valid', or pairs of (before, after)")
    stride = max(1, stride)  # a stride that is not positive is refused by `Window`
    total = max(0, (-(-inputs // stride) - 1) * stride + (size - 1) * dilation + 1 - inputs)
    return total // 2, total - total // 2


Pads = str | Sequence[tuple[int, int]]


def windows(
    dims: Sequence[Dim],
    sizes: Sequence[int],
    strides: int | Sequence[int],
    dilations: int | Sequence[int],
    pads: Pads,
) -> tuple[Window, ...]:
    """One window per dimension; a number is that of every dimension."""
    strides, dilations = ([n] * len(dims) if isinstance(n, int) else n for n in (strides, dilations))
    if not len(dims) == len(sizes) == len(strides) == len(dilations) or not 1 <= len(dims) <= 3:
        raise UserError(
            f"windows along {[d.name for d in dims]}: give 1 to 3 dimensions, and one size, stride and "
            f"dilation for each; found sizes {list(sizes)}, strides {list(strides)}, dilations "
            f"{list(dilations)}"
        )
    out = []
    for i, (d, size, stride, dilation) in enumerate(zip(dims, sizes, strides, dilations, strict=True)):
        before, after = padding(pads, size, stride, dilation, d.size) if isinstance(pads, str) else pads[i]
        out.append(Window(d.name, size, stride, dilation, before, after))
    return tuple(out)


def spread(k: Kernel, x: Any, axis: int, stride: int) -> Any:
    """x with stride-1 zeros between its elements along an axis."""
    if stride == 1:
        return x
    shape = list(x.shape)
    apart = k.reshape(x, [*shape[: axis + 1], 1, *shape[axis + 1 :]])
    apart = k.pad(apart, [(0, stride - 1) if i == axis + 1 else (0, 0) for i in range(len(shape) + 1)])
    sizes = [s * stride if i == axis else s for i, s in enumerate(shape)]
    kept = [(s - 1) * stride + 1 if i == axis else s for i, s in enumerate(shape)]
    return k.slice(k.reshape(apart, sizes), [0] * len(shape), kept)


def padded(k: Kernel, x: Any, edges: Sequence[Edge]) -> Any:
    """x with the axes from the second on padded."""
    for axis, edge in enumerate(edges, 1):
        x = fitted(k, spread(k, x, axis, edge.apart), axis, edge.before, edge.length)
    return x


def strided(k: Kernel, x: Any, axis: int, begin: int, count: int, stride: int) -> Any:
    """`count` elements along an axis from `begin`, `stride` positions apart."""
    sizes = list(x.shape)
    start = [begin if i == axis else 0 for i in range(len(sizes))]
    length = (count - 1) * stride + 1
    x = k.slice(x, start, [length if i == axis else s for i, s in enumerate(sizes)])
    if stride == 1:
        return x
    x = k.pad(x, [(0, stride - 1) if i == axis else (0, 0) for i in range(len(sizes))])
    x = k.reshape(x, [*sizes[:axis], count, stride, *sizes[axis + 1 :]])
    kept = [*sizes[:axis], count, 1, *sizes[axis + 1 :]]
    x = k.slice(x, [0] * len(kept), kept)
    return k.reshape(x, [count if i == axis else s for i, s in enumerate(sizes)])


def fitted(k: Kernel, x: Any, axis: int, before: int, length: int, value: float = 0.0) -> Any:
    """x with `before` elements put before it along an axis (cut off if negative), then made `length` long."""
    size, sizes = x.shape[axis], list(x.shape)
    if before < 0:
        cut = min(-before, size)
        sizes[axis] = size = size - cut
        x = k.slice(x, [cut if i == axis else 0 for i in range(len(sizes))], sizes)
        before = 0
    after = length - before - size
    if after < 0:
        sizes[axis] = size = size + after
        x = k.slice(x, [0] * len(sizes), sizes)
        after = 0
    if not before and not after:
        return x
    return k.pad(x, [(before, after) if i == axis else (0, 0) for i in range(len(sizes))], value)
