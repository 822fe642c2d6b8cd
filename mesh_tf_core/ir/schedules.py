"""Schedules of pipelines as tables of integers: which microbatch a stage has at a tick, and its work.

A step of M microbatches passes through P stages. A stage has C virtual stages (chunks of layers), V in all. A
tick has three slots, in this order: forward, backward with respect to inputs, backward with respect to
weights. In each a stage does one virtual stage of one microbatch, or is idle; the next virtual stage takes
its result at the next tick. Without slots for gradients of weights, the backward slot computes them too.

Every kind follows from where virtual stages are, and when microbatches enter:

  forward   of virtual stage v, microbatch m: tick enters(m) + v
  backward  at once: tick enters(m) + 2 (V - 1) - v, so that a microbatch turns back at the tick at which it
            leaves the last virtual stage; else all ticks of forward come first, and backward is their mirror
  weights   every stage in the order of its backward slots, one at each tick, from the first tick on from
            which no stage has to wait for one of its own

  gpipe        one virtual stage a stage (Huang et al. 2019)
  1f1b         the same, at once (Narayanan et al. 2019, "PipeDream"; Narayanan et al. 2021, section 2.2.1)
  circular:C   virtual stage v at stage v mod P, microbatches in groups of P
  interleaved  the same, at once (Narayanan et al. 2021, "Megatron-LM", section 2.2.2)
  zb-h1        1f1b with slots for weights (Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.3)
  zb-v         two virtual stages a stage, down the stages and up again, with slots for weights (there:
               section 6), so that every stage has as much in flight
  dualpipe     two streams of microbatches in opposite directions, each stage with the layers of two, with
               slots for weights (DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1)

With seconds f, b and w of the three slots, a step takes longer than a stage works, by so much if one program
runs all stages (`PipelineSchedule.together`), or if each has its own (`PipelineSchedule.apart`); b includes w
where weights have no slots, and w <= f <= b:

                       together                  apart
  without own slots    (P - 1) (f + b)           (P - 1) (f + b)
  zb-h1                (P - 1) (f + b)           (P - 1) (f + b - w)
  zb-v                 2 (P - 1) (f + b)         (P - 1) (2 b - w), each for half as many layers
  dualpipe             (P - 2) (f + b)           (P / 2 - 1) (2 b - w)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache

import numpy as np

from mesh_tf_core.errors import UserError, known_names

GPIPE, ONE_F_ONE_B, CIRCULAR, INTERLEAVED = "gpipe", "1f1b", "circular", "interleaved"
IDLE = -1


class StageAction(IntEnum):
    """The action of a stage in a part of a tick."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2


@dataclass(frozen=True)
class ScheduleKind:
    """The properties that distinguish kinds of schedules.

    Attributes:
      rounds: the schedule takes a number of rounds in its name, such as "circular:2".
      at_once: backward of a microbatch starts as soon as it leaves the last virtual stage.
      split: gradients of weights have slots of their own.
      turns: virtual stages run down the stages and up again.
      mirrored: half of the microbatches enter at the last stage, which has a copy of the first one's layers.
    """

    rounds: bool = False
    at_once: bool = False
    split: bool = False
    turns: bool = False
    mirrored: bool = False

    @property
    def lowers(self) -> bool:
        """True if one SPMD program does it: every stage hands on to the same neighbour in a tick."""
        return not (self.turns or self.mirrored)


KINDS = {
    GPIPE: ScheduleKind(),
    ONE_F_ONE_B: ScheduleKind(at_once=True),
    CIRCULAR: ScheduleKind(rounds=True),
    INTERLEAVED: ScheduleKind(rounds=True, at_once=True),
    "zb-h1": ScheduleKind(at_once=True, split=True),
    "zb-v": ScheduleKind(at_once=True, split=True, turns=True),
    "dualpipe": ScheduleKind(at_once=True, split=True, mirrored=True),
}
SCHEDULES = tuple(name + ":2" * kind.rounds for name, kind in KINDS.items() if kind.lowers)
"""The schedules that have programs, by their names."""


def check_schedule(schedule: str, said: str = "") -> None:
    """UserError if it is no schedule, or one without a program; `said`: the option of the request."""
    said, (name, colon, number) = said or f"schedule {schedule!r}", schedule.partition(":")
    kind = KINDS.get(name)
    if kind is None or (colon and not kind.rounds):
        raise UserError(f"{said}: {known_names(schedule, SCHEDULES)}")
    if kind.rounds and (len(number) > 6 or not number.isascii() or not number.isdigit() or int(number) < 2):
        raise UserError(f"{said}: write the number of rounds, at least 2, after the name, e.g. {name}:2")
    if not kind.lowers:
        raise UserError(
            f"{said}: this schedule cannot run, because all stages share one program and this schedule's "
            f"stages send to different neighbours in the same tick; choose from {', '.join(SCHEDULES)}"
        )


def kind_name(schedule: str) -> str:
    """The kind of a schedule, from its name with rounds."""
    return schedule.partition(":")[0]


def rounds_of(schedule: str) -> int:
    """Number of rounds of microbatches through the stages: the number of chunks per stage."""
    name, _, number = schedule.partition(":")
    return int(number) if KINDS[name].rounds else 1


def alternates(schedule: str) -> bool:
    """True if backward of a microbatch starts as soon as it has passed all stages."""
    return KINDS[kind_name(schedule)].at_once


@dataclass(frozen=True)
class PipelineSchedule:
    """A kind of schedule for a number of stages and microbatches: its table, and quantities derived
    from it."""

    kind: str
    stages: int
    microbatches: int
    rounds: int = 1

    @staticmethod
    @lru_cache(maxsize=1024)
    def named(schedule: str, stages: int, microbatches: int) -> PipelineSchedule:
        """The schedule with this name; one object per name, so that derived facts are computed once."""
        return PipelineSchedule(kind_name(schedule), stages, microbatches, rounds_of(schedule))

    @property
    def table(self) -> np.ndarray:
        """[tick, stage, slot, (microbatch, virtual stage of the stage)]; IDLE where a stage does nothing."""
        return _table(self)

    @cached_property
    def chunks(self) -> int:
        """Virtual stages of a stage."""
        kind = KINDS[self.kind]
        return 2 if kind.turns or kind.mirrored else self.rounds

    def done(self, slot: StageAction) -> range:
        """The ticks from the first to the last in which any stage has a slot; none where it is part of
        another."""
        found = np.flatnonzero(self.busy[:, slot])
        return range(int(found[0]), int(found[-1]) + 1) if len(found) else range(0)

    @cached_property
    def busy(self) -> np.ndarray:
        """[tick, slot]: whether any stage does something in a slot."""
        return (self.table[..., 0] != IDLE).any(axis=1)

    @property
    def ticks(self) -> int:
        """Ticks of a forward pass; backward uses as many others, or the same."""
        return len(self.done(StageAction.FORWARD))

    @cached_property
    def works(self) -> int:
        """Ticks of a pass in which a stage works; it is idle in the others."""
        return int((self.table[:, 0, StageAction.FORWARD, 0] != IDLE).sum())

    @property
    def bubble(self) -> float:
        """The share of the ticks of a pass in which a stage is idle."""
        return (self.ticks - self.works) / self.ticks

    @cached_property
    def loops(self) -> tuple[range, ...]:
        """The ticks in parts, in order: a program has a loop for each. A loop begins where a kind of slots
        does, so that the gradients of one kind are added up in one loop, in one place in memory."""
        begins = sorted({found.start for slot in StageAction if (found := self.done(slot))})
        ends = (*begins[1:], len(self.table))
        return tuple(range(begin, end) for begin, end in zip(begins, ends, strict=True))

    def works_in(self, slot: StageAction, ticks: range) -> int:
        """For how many of the ticks of a loop, the first ones, any stage has a slot."""
        return len(range(max(self.done(slot).start, ticks.start), min(self.done(slot).stop, ticks.stop)))

    def passing(self, slot: StageAction, end: bool) -> np.ndarray:
        """[tick]: the microbatch at the first virtual stage, or at the last one at the `end`; IDLE where none
        is. One stream alone."""
        stage, chunk = (self.stages - 1, self.chunks - 1) if end else (0, 0)
        found = self.table[:, stage, slot]
        return np.where((found[:, 0] != IDLE) & (found[:, 1] == chunk), found[:, 0], IDLE)

    @property
    def last(self) -> StageAction:
        """The last slot of a virtual stage."""
        return StageAction.WEIGHTS if KINDS[self.kind].split else StageAction.BACKWARD

    def places(self, begin: StageAction) -> np.ndarray:
        """[tick, stage, slot]: the position in a ring of a stage where slots of one kind store a value, which
        other slots read until the last one. A slot that puts nothing there has a place that is free at that
        time."""
        return _places(self, begin)

    def ring(self, begin: StageAction) -> int:
        """The number of places in the ring."""
        return int(self.places(begin).max()) + 1

    @property
    def in_flight(self) -> int:
        """Positions for saved values of forward: the largest number of virtual stages of microbatches in
        flight at a stage."""
        return self.ring(StageAction.FORWARD)

    def in_flight_apart(self, stage: int) -> int:
        """The same at one stage, if each has a program of its own: with s stages behind it, it goes forward s
        times before it goes backward, and with R chunks 2 s + (R - 1) P times (Narayanan et al. 2021, section
        2.2; `get_pp_rank_microbatches` of Megatron-Core's pipeline_parallel/schedules.py)."""
        before, every = self.stages - 1 - stage, self.microbatches * self.chunks
        if self.chunks > 1:
            before = 2 * before + (self.chunks - 1) * self.stages
        return min(every, before + 1) if KINDS[self.kind].at_once else every

    @property
    def held(self) -> np.ndarray:
        """[stage]: virtual stages of microbatches in flight there, at most."""
        there = (self.table[..., 0] != IDLE).astype(int)
        over = np.cumsum(there[..., self.last], axis=0) - there[..., self.last]
        return (np.cumsum(there[..., StageAction.FORWARD], axis=0) - over).max(axis=0)

    def together(self, costs: Sequence[float]) -> float:
        """Seconds of one program that all stages run: each slot takes its time in every tick in which any
        stage has it.

        Args:
          costs: seconds of a slot of each kind.
        """
        return float((self.busy @ np.asarray(costs, float)).sum())

    def apart(self, costs: Sequence[float]) -> float:
        """Seconds of one program per stage: each stage runs its slots one after the other, each as soon as
        its inputs arrive.

        Args:
          costs: seconds of a slot of each kind.
        """
        every = np.repeat(np.asarray(costs, float)[:, None], self.virtual.max() + 1, axis=1)
        return float((self.path(every) * every[:, self.virtual]).sum())

    @property
    def virtual(self) -> np.ndarray:
        """[stage, chunk]: which virtual stage it is; of the stream that takes it, if there are two."""
        return _virtual(self)

    def path(self, costs: np.ndarray) -> np.ndarray:
        """[slot, stage, chunk]: how many slots follow each other on the way that takes longest, if each stage
        has its own program: each waits for its inputs, or for the slot before it on its stage.

        Args:
          costs: seconds, [slot, virtual stage].
        """
        virtual, free = self.virtual, [-1] * self.stages
        ends, before, slots = [0.0], [-1], list[tuple[int, int, int]]()
        done, last = dict[tuple[int, int, int], int](), int(virtual.max())
        for tick, slot, stage in np.argwhere(self.table[..., 0].transpose(0, 2, 1) != IDLE).tolist():
            item, chunk = self.table[tick, stage, slot].tolist()
            at = int(virtual[stage, chunk])
            takes = {
                StageAction.FORWARD: (StageAction.FORWARD, at - 1, item),
                StageAction.BACKWARD: (StageAction.BACKWARD, at + 1, item)
                if at < last
                else (StageAction.FORWARD, at, item),
                StageAction.WEIGHTS: (StageAction.BACKWARD, at, item),
            }[StageAction(slot)]
            # Of equal ways, the one that stays at its stage.
            come = max(free[stage], done.get(takes, -1), key=lambda i: ends[i + 1])
            free[stage] = done[slot, at, item] = len(slots)
            slots.append((slot, stage, chunk))
            before.append(come)
            ends.append(ends[come + 1] + float(costs[slot, at]))
        found, here = np.zeros((len(StageAction), *virtual.shape), int), int(np.argmax(ends)) - 1
        while here >= 0:
            found[slots[here]] += 1
            here = before[here + 1]
        return found


def _virtual(of: PipelineSchedule) -> np.ndarray:
    stage, chunk = np.indices((of.stages, of.chunks))
    kind = KINDS[of.kind]
    if kind.turns or kind.mirrored:
        return np.where(chunk == 1, (of.stages * (1 + kind.turns)) - 1 - stage, stage)
    return chunk * of.stages + stage


@lru_cache(maxsize=256)
def _table(of: PipelineSchedule) -> np.ndarray:
    kind, virtual, item = KINDS[of.kind], _virtual(of)[..., None], np.arange(of.microbatches)
    if kind.mirrored and (of.stages % 2 or of.microbatches % 2):
        raise UserError(
            f"schedule {of.kind}: the numbers of microbatches and stages must be even, found "
            f"{of.microbatches} microbatches and {of.stages} stages"
        )
    enters = item // of.stages * of.stages * of.chunks + item % of.stages
    enters = 2 * item if kind.turns else item // 2 * 2 if kind.mirrored else enters
    ticks = {StageAction.FORWARD: enters + virtual}
    back, last = enters + 2 * virtual.max() - virtual, ticks[StageAction.FORWARD].max()
    ticks[StageAction.BACKWARD] = back if kind.at_once else 2 * last + 1 - ticks[StageAction.FORWARD]
    takes = np.ones_like(back, bool)
    if kind.mirrored:
        takes = np.broadcast_to(item % 2 == np.arange(of.chunks)[:, None], back.shape)
    if kind.split:
        each = np.where(takes, back, back.max() + 1).reshape(of.stages, -1)
        rank = each.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable").reshape(back.shape)
        ticks[StageAction.WEIGHTS] = rank + (back - rank)[takes].max()
    table = np.full(
        (max(t[takes].max() for t in ticks.values()) + 1, of.stages, len(StageAction), 2), IDLE, np.int32
    )
    stage, chunk, item = np.nonzero(takes)
    for slot, when in ticks.items():
        table[when[stage, chunk, item], stage, slot] = np.stack([item, chunk], axis=1)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=64)
def _places(of: PipelineSchedule, begin: StageAction) -> np.ndarray:
    places = np.zeros(of.table.shape[:3], np.int32)
    for stage in range(of.stages):
        free: list[int] = []  # a heap, so that the first free place is taken
        lies, most = dict[tuple[int, int], int](), 0
        for tick, row in enumerate(of.table[:, stage].tolist()):
            found = heapq.heappop(free) if free else most
            most = max(most, found + 1) if of.busy[tick, begin] else most
            places[tick, stage, begin] = found
            if row[begin][0] == IDLE:
                heapq.heappush(free, found) if found < most else None
            else:
                lies[tuple(row[begin])] = found
            for slot in list(StageAction)[begin + 1 :]:
                if row[slot][0] != IDLE:
                    places[tick, stage, slot] = lies[tuple(row[slot])]
            if row[of.last][0] != IDLE:
                heapq.heappush(free, lies.pop(tuple(row[of.last])))
    return places
