"""When a pipeline works on what: microbatches enter its first stage and leave its last at certain ticks.

At a tick every stage works on one microbatch and then hands it on to the next stage (Huang et al. 2019,
"GPipe"). With M microbatches and P stages, of M + P - 1 ticks a stage works in M and waits in P - 1: stage s
has microbatch tick - s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, TICK
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.common import listing

GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"
SCHEDULES = (GPIPE, ONE_F_ONE_B)
"""When stages go backward: after all microbatches (`tracing.pipeline`), or each microbatch as soon as it has
gone through all stages (`tracing.one_forward_one_backward`)."""
WHY = "microbatches come one after the other"


@dataclass(frozen=True)
class Schedule:
    """How many microbatches pass how many stages."""

    microbatches: int
    stages: int

    @property
    def ticks(self) -> int:
        return self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the ticks in which a stage waits."""
        return (self.stages - 1) / self.ticks

    def first(self, end: bool) -> int:
        """The tick at which the first microbatch enters, or leaves at the `end`; the others follow."""
        return self.stages - 1 if end else 0


def _first(op: str, name: str, inputs: Sequence[TensorType], size: int) -> Shape:
    """The dimensions behind the first; UserError if that is another one."""
    shape = inputs[0].shape
    if not len(shape) or shape.dims[0] != Dim(name, size):
        raise UserError(f"{op} of {listing(inputs)}: needs {name}:{size} first")
    return shape.without(name)


@dataclass(frozen=True)
class ToTicks(Op):
    """x [microbatch, rest] as [tick, rest]: each microbatch at the tick at which it enters the pipeline, or
    leaves it at the `end`. At the other ticks is zero, or, to `fill` it, the first microbatch: stages that
    wait work on numbers like others, and no gradient comes back from them."""

    schedule: Schedule
    end: bool
    fill: bool
    kind: ClassVar[str] = "data"
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        rest = inputs[0].shape.without(MICROBATCH).names
        return Roles(parallel=rest, whole={MICROBATCH: WHY, TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        rest = _first("to_ticks", MICROBATCH, inputs, self.schedule.microbatches)
        return TensorType(Shape([Dim(TICK, self.schedule.ticks), *rest]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (x,), rest = slices, at.inputs[0].shape.sizes[1:]
        before = self.schedule.first(self.end)
        after = self.schedule.stages - 1 - before
        if not self.fill:
            return k.pad(x, [(before, after), *((0, 0) for _ in rest)])
        one = k.slice(x, [0] * (1 + len(rest)), (1, *rest))
        gaps = [k.broadcast_to(one, (size, *rest)) if size else None for size in (before, after)]
        return k.concat([part for part in (gaps[0], x, gaps[1]) if part is not None], 0)

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(FromTicks(self.schedule, self.end), dy),)


@dataclass(frozen=True)
class FromTicks(Op):
    """x [tick, rest] as [microbatch, rest]: what is there as each microbatch enters, or leaves at the
    `end`."""

    schedule: Schedule
    end: bool
    kind: ClassVar[str] = "data"
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        rest = inputs[0].shape.without(TICK).names
        return Roles(parallel=rest, whole={MICROBATCH: WHY, TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        rest = _first("from_ticks", TICK, inputs, self.schedule.ticks)
        return TensorType(Shape([Dim(MICROBATCH, self.schedule.microbatches), *rest]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        rest = at.inputs[0].shape.sizes[1:]
        begin = self.schedule.first(self.end), *(0 for _ in rest)
        return k.slice(slices[0], begin, (self.schedule.microbatches, *rest))

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(ToTicks(self.schedule, self.end, False), dy),)
