"""When a pipeline works on what: microbatches enter its first stage and leave its last at certain ticks.

At a tick every stage works on one microbatch and then hands it on to the next stage (Huang et al. 2019,
"GPipe"). With M microbatches and P stages, of M + P - 1 ticks a stage works in M and waits in P - 1: stage s
has microbatch tick - s.

In a circular schedule a microbatch goes round R times (Narayanan et al. 2021, "Efficient large-scale language
model training on GPU clusters using Megatron-LM", section 2.2): a stage has R chunks of layers, chunk r of
stage s being number r P + s of all, and what the last stage hands on goes to the first. Microbatches go round
in groups of P. Of its own tick u = tick - s, a stage works on microbatch g P + u mod P in round r, where
g = u div (P R) and r = (u mod P R) div P. A tick is 1/R of a stage's layers. The last of
G = ceil(M / P) groups has m = M - (G - 1) P microbatches, so that there are

    (G - 1) P R + (R - 1) P + m + P - 1

ticks, of which a stage works in M R: where P divides M, M R + P - 1, and it waits in P - 1 as before, for
1/R as long.

An interleaved schedule goes round in the same order, and backward as well, the last stage and the last chunk
first; a microbatch turns round as soon as it has left the last stage (there: figure 4), P R - 1 ticks after
its beginning. Ticks backward are as many. Of a chunk r in flight at a stage are at most 2 P microbatches if
2 r < R, else P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import MICROBATCH, TICK
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.common import listing
from mesh_tf_core.ops.kinds import Move

GPIPE, ONE_F_ONE_B, CIRCULAR, INTERLEAVED = "gpipe", "1f1b", "circular", "interleaved"
SCHEDULES = (GPIPE, ONE_F_ONE_B, f"{CIRCULAR}:2", f"{INTERLEAVED}:2")
"""When stages go backward: after all microbatches (`tracing.pipeline`), or each microbatch as soon as it has
gone through all stages (`tracing.one_forward_one_backward`). In "circular:R" each has R chunks of layers, and
goes backward after all microbatches; in "interleaved:R" it has as many, and each microbatch goes backward at
once."""
_ROUND = {CIRCULAR: "circular:2", INTERLEAVED: "interleaved:2"}
WHY = "microbatches come one after the other"


def check_schedule(schedule: str, said: str = "") -> None:
    """UserError if it is none; `said`: what it was asked for by."""
    said, (order, _, number) = said or f"schedule {schedule!r}", schedule.partition(":")
    if schedule not in SCHEDULES and order not in _ROUND:
        raise UserError(f"{said}: {known_names(schedule, SCHEDULES)}")
    if order in _ROUND and (
        len(number) > 6 or not number.isascii() or not number.isdigit() or int(number) < 2
    ):
        raise UserError(f"{said}: say how often microbatches go round, twice or more, as {_ROUND[order]}")


def rounds_of(schedule: str) -> int:
    """How often microbatches go through the stages: into how many chunks these divide their layers."""
    order, _, number = schedule.partition(":")
    return int(number) if order in _ROUND else 1


def alternates(schedule: str) -> bool:
    """Whether a microbatch goes backward as soon as it has gone through all stages."""
    return schedule == ONE_F_ONE_B or schedule.startswith(f"{INTERLEAVED}:")


@dataclass(frozen=True)
class Schedule:
    """How many microbatches pass how many stages, and how often."""

    microbatches: int
    stages: int
    rounds: int = 1

    @property
    def group(self) -> int:
        """Ticks from one group of microbatches to the next."""
        return self.stages * self.rounds

    @property
    def groups(self) -> int:
        """Of microbatches, as many in each as there are stages, in the last one fewer."""
        return -(-self.microbatches // self.stages)

    @property
    def ticks(self) -> int:
        last = self.microbatches - (self.groups - 1) * self.stages
        return (self.groups - 1) * self.group + (self.rounds - 1) * self.stages + last + self.stages - 1

    @property
    def works(self) -> int:
        """Ticks in which a stage works; in the others it waits."""
        return self.microbatches * self.rounds

    @property
    def bubble(self) -> float:
        """The share of the ticks in which a stage waits."""
        return (self.ticks - self.works) / self.ticks

    def first(self, end: bool) -> int:
        """The tick at which the first microbatch enters, or leaves at the `end`; the others of its group
        follow, and those of the next one `group` ticks later."""
        return self.group - 1 if end else 0

    def passing(self, end: bool, begin: int, count: int) -> int:
        """How many microbatches enter, or leave at the `end`, in `count` ticks from one on."""
        groups = (divmod(item, self.stages) for item in range(self.microbatches))
        ticks = (self.first(end) + group * self.group + place for group, place in groups)
        return sum(begin <= tick < begin + count for tick in ticks)

    @property
    def early(self) -> int:
        """Of the chunks of a stage, how many have microbatches of two groups in flight where it goes backward
        at once: the first half."""
        return (self.rounds + 1) // 2

    @property
    def in_flight(self) -> int:
        """Places for what is in flight in a stage that goes backward at once: `kept` in every early chunk,
        and one for each stage in the others."""
        return self.early * self.kept + (self.rounds - self.early) * self.stages

    @property
    def kept(self) -> int:
        """Microbatches of an early chunk that are in flight."""
        return 2 * self.stages - (self.rounds == 1)


def _first(op: str, name: str, inputs: Sequence[TensorType], size: int) -> Shape:
    """The dimensions behind the first; UserError if that is another one."""
    shape = inputs[0].shape
    if not len(shape) or shape.dims[0] != Dim(name, size):
        raise UserError(f"{op} of {listing(inputs)}: needs {name}:{size} first")
    return shape.without(name)


@dataclass(frozen=True)
class ToTicks(Move):
    """x [microbatch, rest] as [tick, rest]: each microbatch at the tick at which it enters the pipeline, or
    leaves it at the `end`. At the other ticks is zero, or, to `fill` it, the first microbatch: stages that
    wait work on numbers like others, and no gradient comes back from them."""

    schedule: Schedule
    end: bool
    fill: bool
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        rest = inputs[0].shape.without(MICROBATCH).names
        return Roles(parallel=rest, whole={MICROBATCH: WHY, TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        rest = _first("to_ticks", MICROBATCH, inputs, self.schedule.microbatches)
        return TensorType(Shape([Dim(TICK, self.schedule.ticks), *rest]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (x,), rest, plan = slices, at.inputs[0].shape.sizes[1:], self.schedule
        one = k.slice(x, [0] * (1 + len(rest)), (1, *rest)) if self.fill else None

        def longer(x: Any, axis: int, ends: tuple[int, int]) -> Any:
            """x with more at the ends of an axis."""
            sizes = list(x.shape)
            if one is None:
                return k.pad(x, [ends if i == axis else (0, 0) for i in range(len(sizes))])
            like = k.reshape(one, [*(1 for _ in sizes[: len(sizes) - len(rest)]), *rest])
            gaps = [[size if i == axis else n for i, n in enumerate(sizes)] for size in ends]
            more = [k.broadcast_to(like, gap) if gap[axis] else None for gap in gaps]
            return k.concat([part for part in (more[0], x, more[1]) if part is not None], axis)

        if plan.rounds > 1:
            x = longer(x, 0, (0, plan.groups * plan.stages - plan.microbatches))
            x = longer(k.reshape(x, (plan.groups, plan.stages, *rest)), 1, (0, plan.group - plan.stages))
            x = k.reshape(x, (plan.groups * plan.group, *rest))
        before = plan.first(self.end)
        after = plan.ticks - before - x.shape[0]
        x = longer(x, 0, (before, max(after, 0)))
        return x if after >= 0 else k.slice(x, [0] * (1 + len(rest)), (plan.ticks, *rest))

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(FromTicks(self.schedule, self.end), dy),)


@dataclass(frozen=True)
class FromTicks(Move):
    """x [tick, rest] as [microbatch, rest]: what is there as each microbatch enters, or leaves at the
    `end`."""

    schedule: Schedule
    end: bool
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        rest = inputs[0].shape.without(TICK).names
        return Roles(parallel=rest, whole={MICROBATCH: WHY, TICK: WHY})

    def infer(self, *inputs: TensorType) -> TensorType:
        rest = _first("from_ticks", TICK, inputs, self.schedule.ticks)
        return TensorType(Shape([Dim(MICROBATCH, self.schedule.microbatches), *rest]), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        (x,), rest, plan = slices, at.inputs[0].shape.sizes[1:], self.schedule
        begin, none = plan.first(self.end), [0] * len(rest)
        if plan.rounds == 1:
            return k.slice(x, (begin, *none), (plan.microbatches, *rest))
        whole = plan.groups * plan.group
        x = k.slice(x, (begin, *none), (min(plan.ticks - begin, whole), *rest))
        x = k.pad(x, [(0, whole - x.shape[0]), *((0, 0) for _ in rest)])
        x = k.slice(
            k.reshape(x, (plan.groups, plan.group, *rest)), (0, 0, *none), (plan.groups, plan.stages, *rest)
        )
        x = k.reshape(x, (plan.groups * plan.stages, *rest))
        return k.slice(x, (0, *none), (plan.microbatches, *rest))

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(ToTicks(self.schedule, self.end, False), dy),)
