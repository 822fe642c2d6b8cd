"""The seconds of calls of array functions (`array_functions` counts them). Hardware whose file has curves of
classes `kernel.…` is predicted as follows:

(1) seconds of an instruction = sum over its calls of curve(class of the call)(bytes)
(2) a result that stays costs curve(`kernel.fresh`)(its bytes) more: it needs memory that is in no cache. The
    outputs of forward and backward operations stay until others have read them, and other devices' results
    come in between. Results inside of an operation lie in memory that was in use a moment ago, and so do
    those of an update: its arrays are all of one size, and each takes the place of the one before
(3) a matrix product costs curve(`kernel.matmul`)(FLOPs) + curve(`kernel.matmul.PART`)(bytes) of its parts
    (`PARTS`): libraries pack factors before they multiply, and slower where they read along columns. A batch
    of products takes `kernel.batch` instead; a convolution `kernel.matmul.conv`, whose first factor are the
    windows. Its FLOPs count the channels that it makes in whole vectors: 2 take as long as 16 (oneDNN works
    on blocks of `VECTOR` channels: "Understanding Memory Formats" in its developer guide)
(4) what follows from constants alone, up to 100 KB, is computed when a step is traced (TensorFlow's constant
    folding, grappler/optimizers/constant_folding.cc) and costs nothing
(5) every call takes `kernel.launch` more: to hand a kernel to a thread, find memory for its result and fetch
    its code. Probes, which repeat one kernel, hardly see it; a step, where every kernel is another one, does.
    A function of scalars takes nothing else (every variable's update has some of its own: powers of the
    step's number, the learning rate)

A class without a curve has that of its prefix: `kernel.unary.tanh`, else `kernel.unary`, else `kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mesh_tf_core.ir.dtypes import itemsize

Seconds = Callable[[float], float]

PARTS = ("operands", "second", "result", "columns", "strides")
"""The parts of a product: the first factor, the second one, and the result; factors that are read along
columns, in rows of less than `FAR` bytes and of more."""
FAR = 2048
"""Bytes from one row to the next from which on a column's elements share few places of a cache, and its pages
few of the table of pages."""
SCALAR = "kernel.scalar"
"""Class of functions of single numbers."""


@dataclass(frozen=True, slots=True)
class Call:
    """One array function on one device.

    Attributes:
      op_class: `kernel.` and the function, from coarse to fine.
      dtype: of its result.
      bytes: read and written.
      flops: of a matrix product, else 0.
      made: bytes of the result.
      parts: bytes of a matrix product, by `PARTS`.
      final: whether the result is the operation's output.
    """

    op_class: str
    dtype: str
    bytes: float
    flops: float = 0.0
    made: float = 0.0
    parts: tuple[float, ...] = ()
    final: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """An array without elements; `constant`: it follows from constants alone."""

    shape: tuple[int, ...]
    dtype: str
    constant: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


class NoArrayFunctionError(AttributeError):
    """An array function that `Tally` does not have, so that nothing is known of its time."""


def call_seconds(call: Call, curve: Callable[[str], Seconds | None], stays: bool = True) -> float:
    """Equations (1) to (5); `curve` gives the curve of a class, or None.

    Args:
      stays: whether the operation's output stays, equation (2).

    Raises:
      KeyError: there is no curve for any prefix of the class.
    """
    launch = curve("kernel.launch")
    start = 0.0 if launch is None else launch(0.0)
    if call.op_class == SCALAR:
        return start
    name, own = call.op_class, curve(call.op_class)
    while own is None and "." in name:
        name = name.rpartition(".")[0]
        own = curve(name)
    if own is None:
        raise KeyError(call.op_class)
    seconds = start + (own(call.flops) if call.flops else own(call.bytes))
    for part, moved in zip(PARTS, call.parts, strict=False):
        if moved and (more := curve(f"{name}.{part}")) is not None:
            seconds += more(moved)
    if stays and call.final and (fresh := curve("kernel.fresh")) is not None:
        seconds += fresh(call.made)
    return seconds
