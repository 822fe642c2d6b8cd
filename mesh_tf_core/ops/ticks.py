"""When a pipeline works on what: microbatches enter its first stage and leave its last at certain ticks.

At a tick every stage works on one microbatch and then hands it on to the next stage (Huang et al. 2019,
"GPipe"). With `rounds` R > 1 a stage holds R shorter runs of layers, and every microbatch passes all stages R
times: groups of as many microbatches as there are stages go round, one group after the other (Narayanan et
al. 2021, "Efficient large-scale language model training", section 2.2). With M microbatches and P stages

  ticks   M R + P - 1, of which a stage works in M R: it waits in P - 1
  item    w = tick - stage, of group w // (P R), in round (w mod P R) // P, on microbatch group P + w mod P
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, TICK
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.common import listing

WHY = "microbatches come one after the other"


@dataclass(frozen=True)
class Schedule:
    """How many microbatches pass how many stages how often."""

    microbatches: int
    stages: int
    rounds: int = 1

    @property
    def ticks(self) -> int:
        return self.microbatches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of the ticks in which a stage waits."""
        return (self.stages - 1) / self.ticks

    def runs(self, end: bool) -> Iterator[tuple[int, int, int]]:
        """(tick, microbatch, how many): when microbatches enter, or leave at the `end`."""
        group = self.microbatches if self.rounds == 1 else self.stages
        late = self.rounds * self.stages - 1 if end else 0
        for begin in range(0, self.microbatches, group):
            yield begin * self.rounds + late, begin, group


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
        (x,), rest, dtype = slices, at.inputs[0].shape.sizes[1:], at.inputs[0].dtype
        zeros = (0,) * len(rest)
        parts: list[Any] = []
        done = 0

        def gap(size: int) -> None:
            if size and self.fill:
                parts.append(k.broadcast_to(k.slice(x, (0, *zeros), (1, *rest)), (size, *rest)))
            elif size:
                parts.append(k.full((size, *rest), 0, dtype))

        for tick, microbatch, size in self.schedule.runs(self.end):
            gap(tick - done)
            parts.append(k.slice(x, (microbatch, *zeros), (size, *rest)))
            done = tick + size
        gap(self.schedule.ticks - done)
        return k.concat(parts, 0) if len(parts) > 1 else parts[0]

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
        (x,), rest = slices, at.inputs[0].shape.sizes[1:]
        zeros = (0,) * len(rest)
        runs = self.schedule.runs(self.end)
        parts = [k.slice(x, (tick, *zeros), (size, *rest)) for tick, _, size in runs]
        return k.concat(parts, 0) if len(parts) > 1 else parts[0]

    def flops(self, *local: TensorType) -> float:
        return 0.0

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(ToTicks(self.schedule, self.end, False), dy),)
