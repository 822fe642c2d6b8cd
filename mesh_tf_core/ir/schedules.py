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

In zb-v, dualpipev and dualpipe every stage has an order of its own (`ir.stage_orders`).

With seconds f, b and w of the three slots, a step takes longer than a stage works, by so much if one program
runs all stages, or if each has its own (`PipelineSchedule.path`); b includes w where weights have no slots,
and w <= f <= b:

                       one program        a program for each stage
  without own slots    (P - 1) (f + b)    (P - 1) (f + b)
  zb-h1                (P - 1) (f + b)    (P - 1) (f + b - w)
  zb-v                                    (P - 1) max(b, 2 f - w), each for half as many layers
  dualpipev                               (P - 1) (f + 2 b - w) at most, the same
  dualpipe                                (P / 2 - 1) (f + 2 b - w) at most
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter

import numpy as np

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.stage_orders import (
    IDLE,
    UNEQUAL,
    Interleaved,
    Order,
    StageAction,
    StageWork,
    arrivals_of,
    dualpipe,
    dualpipe_v,
    places_of,
    ticks_of,
    timed,
    zero_bubble_v,
)

GPIPE, ONE_F_ONE_B, CIRCULAR, INTERLEAVED = "gpipe", "1f1b", "circular", "interleaved"


@dataclass(frozen=True)
class ScheduleKind:
    """The properties that distinguish kinds of schedules.

    Attributes:
      rounds: the schedule takes a number of rounds in its name, such as "circular:2".
      at_once: backward of a microbatch starts as soon as it leaves the last virtual stage.
      split: gradients of weights have slots of their own.
      turns: virtual stages run down the stages and up again.
      mirrored: half of the microbatches enter at the last stage, which has a copy of the first one's layers.
      pairs: slots of two microbatches, forward and backward, are one block, whose messages and products
        programs of their own run at once.
      order: of the slots of a stage, if these do not follow from the above.
    """

    rounds: bool = False
    at_once: bool = False
    split: bool = False
    turns: bool = False
    mirrored: bool = False
    pairs: bool = False
    order: Callable[[int, int, int], Order] | None = None

    @property
    def one_way(self) -> bool:
        """True if all microbatches pass the stages in one direction, and are handed on in every tick."""
        return self.order is None


KINDS = {
    GPIPE: ScheduleKind(),
    ONE_F_ONE_B: ScheduleKind(at_once=True),
    CIRCULAR: ScheduleKind(rounds=True),
    INTERLEAVED: ScheduleKind(rounds=True, at_once=True),
    "zb-h1": ScheduleKind(at_once=True, split=True),
    "zb-v": ScheduleKind(at_once=True, split=True, turns=True, order=zero_bubble_v),
    "dualpipev": ScheduleKind(at_once=True, split=True, turns=True, pairs=True, order=dualpipe_v),
    "dualpipe": ScheduleKind(at_once=True, split=True, mirrored=True, pairs=True, order=dualpipe),
}
NAMES = tuple(name + ":2" * kind.rounds for name, kind in KINDS.items())
"""All schedules, by their names."""
ONE_WAY = tuple(name for name in NAMES if KINDS[name.partition(":")[0]].one_way)
"""Those in which all microbatches pass the stages in one direction, and are handed on in every tick."""


def check_schedule(schedule: str, said: str = "") -> None:
    """UserError if it is no schedule; `said`: the option of the request."""
    said, (name, number, unequal) = said or f"schedule {schedule!r}", _parts(schedule)
    kind = KINDS.get(name)
    if kind is None or ((number or schedule.endswith(":")) and not kind.rounds):
        raise UserError(f"{said}: {known_names(schedule, NAMES)}")
    if not UNEQUAL.fullmatch(unequal):
        raise UserError(
            f"{said}: {unequal!r} does not say how many layers stages have; write first=N, last=N, "
            "first=N:last=N, or layers=N+N+... with a number for each virtual stage"
        )
    if kind.rounds and (len(number) > 6 or not number.isascii() or not number.isdigit() or int(number) < 2):
        raise UserError(
            f"{said}: write the number of rounds, from 2 to 999999, after the name, e.g. {name}:2"
        )


def _parts(schedule: str) -> tuple[str, str, str]:
    """Kind, rounds, and the layers of stages ("" each if not given) of a name as "interleaved:2:first=3"."""
    name, _, rest = schedule.partition(":")
    number, _, unequal = ("", "", rest) if "=" in rest.partition(":")[0] else rest.partition(":")
    return name, number, unequal


def kind_name(schedule: str) -> str:
    """The kind of a schedule, from its name with rounds."""
    return schedule.partition(":")[0]


def rounds_of(schedule: str) -> int:
    """Number of rounds of microbatches through the stages: the number of chunks per stage."""
    name, number, _ = _parts(schedule)
    return int(number) if KINDS[name].rounds else 1 + KINDS[name].turns


def layer_order(schedule: str, stages: int) -> Interleaved:
    """The order of layers on the stages of a schedule."""
    return PipelineSchedule.named(schedule, stages, 1).order


@dataclass(frozen=True)
class PipelineSchedule:
    """A kind of schedule for a number of stages and microbatches: its table, and quantities derived
    from it."""

    kind: str
    stages: int
    microbatches: int
    rounds: int = 1
    unequal: str = ""

    @staticmethod
    @lru_cache(maxsize=1024)
    def named(schedule: str, stages: int, microbatches: int) -> PipelineSchedule:
        """The schedule with this name; one object per name, so that derived facts are computed once."""
        name, _, unequal = _parts(schedule)
        return PipelineSchedule(name, stages, microbatches, rounds_of(schedule), unequal)

    @property
    def order(self) -> Interleaved:
        """The order of layers on the stages."""
        kind = KINDS[self.kind]
        return Interleaved(self.stages, self.rounds, self.unequal, kind.turns, kind.mirrored)

    @cached_property
    def table(self) -> np.ndarray:
        """[tick, stage, slot, (microbatch, virtual stage of the stage)]; IDLE where a stage does nothing."""
        works = _in_one_direction if KINDS[self.kind].one_way else _in_order
        return filled(self, [*works(self)])

    @cached_property
    def chunks(self) -> int:
        """Virtual stages of a stage."""
        return self.order.chunks

    @property
    def streams(self) -> int:
        """In how many directions microbatches pass."""
        return 1 + KINDS[self.kind].mirrored

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

    @property
    def works(self) -> int:
        """Ticks of a pass in which a stage works; it is idle in the others."""
        return self.microbatches * self.rounds

    def idle(self, slot: StageAction = StageAction.FORWARD) -> float:
        """The share of the ticks with slots of a kind in which a stage has none of its own."""
        ticks = len(self.done(slot))
        return (ticks - self.works) / max(ticks, 1)

    @cached_property
    def loops(self) -> tuple[range, ...]:
        """The ticks in parts, in order: a program has a loop for each. A loop begins where a kind of slots
        does, or the losses of microbatches, so that the gradients of one kind are added up in one loop, in
        one place in memory."""
        losses, at_once = self.passing(StageAction.FORWARD, True) != IDLE, KINDS[self.kind].at_once
        slots = (slot for slot in StageAction if not (at_once and slot is StageAction.BACKWARD))
        begins = sorted({int(losses.argmax()), *(done.start for slot in slots if (done := self.done(slot)))})
        ends = (*begins[1:], len(self.table))
        return tuple(range(begin, end) for begin, end in zip(begins, ends, strict=True))

    def works_in(self, slot: StageAction, ticks: range) -> int:
        """How many of the ticks of a loop, the first ones, there are until the last in which any stage has a
        slot."""
        done = self.done(slot)
        return max(min(done.stop, ticks.stop) - ticks.start, 0) if done.start < ticks.stop else 0

    def end(self, end: bool, stream: int = 0) -> tuple[int, int]:
        """The stage and the chunk of the first virtual stage of a stream, or of the last one at the `end`."""
        chunk, stage = np.argwhere((self.virtual.max() if end else 0) == self.virtual.T)[stream].tolist()
        return stage, chunk

    def passing(self, slot: StageAction, end: bool, stream: int = 0) -> np.ndarray:
        """[tick]: the microbatch of a stream at the first virtual stage, or at the last one at the `end`;
        IDLE where none is."""
        stage, chunk = self.end(end, stream)
        found = self.table[:, stage, slot]
        return np.where((found[:, 0] != IDLE) & (found[:, 1] == chunk), found[:, 0], IDLE)

    @cached_property
    def turning(self) -> int:
        """How many microbatches there are at most between forward and backward of the last virtual stage; 0
        if backward follows in the same tick."""
        forward, backward = (self.passing(slot, True) != IDLE for slot in list(StageAction)[:2])
        same = np.array_equal(forward, backward)
        return 0 if same else int((np.cumsum(forward) - np.cumsum(backward) + backward).max())

    @property
    def last(self) -> StageAction:
        """The last slot of a virtual stage."""
        return StageAction.WEIGHTS if KINDS[self.kind].split else StageAction.BACKWARD

    @cached_property
    def places(self) -> Sequence[np.ndarray]:
        """Kind of slots -> [tick, stage, slot]: the position in a ring of a stage where slots of this kind
        store a value, which other slots read until the last one; IDLE where nothing is stored, or read as
        zeros."""
        return [places_of(self.table, begin, self.last) for begin in list(StageAction)[:2]]

    def ring(self, begin: StageAction) -> int:
        """The number of places in the ring."""
        return int(self.places[begin].max()) + 1

    @cached_property
    def arrivals(self) -> Sequence[np.ndarray]:
        """Kind of slots -> [tick, stage, way]: the place in a ring of a stage where a result of slots of this
        kind arrives at the end of a tick, from the stage before it, or from the one behind or itself; and
        where a slot takes one; IDLE where none does."""
        return [arrivals_of(self.table, self.virtual, slot) for slot in list(StageAction)[:2]]

    def waiting(self, slot: StageAction) -> int:
        """The number of places in that ring."""
        return int(self.arrivals[slot].max()) + 1

    @property
    def in_flight(self) -> int:
        """Positions for saved values of forward: the largest number of virtual stages of microbatches in
        flight at a stage."""
        return self.ring(StageAction.FORWARD)

    def in_flight_apart(self, stage: int) -> int:
        """The same at one stage, if each has a program of its own: with s stages behind it, it goes forward s
        times before it goes backward, and with R chunks 2 s + (R - 1) N times, with N microbatches a round: P
        (Narayanan et al. 2021, section 2.2), or more if P does not divide M (`ScheduleInterleaved1F1B`)."""
        if KINDS[self.kind].order is not None:
            return int(self.held[stage])
        before, every = self.stages - 1 - stage, self.microbatches * self.chunks
        if KINDS[self.kind].split:  # inputs are kept until the slot of weights
            before = self.stages - 1
        if self.chunks > 1:
            passes = max(1, self.microbatches // self.stages)
            before = 2 * before + (self.chunks - 1) * -(-self.microbatches // passes)
        return min(every, before + 1) if KINDS[self.kind].at_once else every

    @property
    def held(self) -> np.ndarray:
        """[stage]: virtual stages of microbatches in flight there, at most."""
        return self._open(StageAction.FORWARD).max(axis=0)

    def _open(self, begin: StageAction) -> np.ndarray:
        """[tick, stage]: virtual stages of microbatches between a slot and their last one."""
        there = (self.table[..., 0] != IDLE).astype(int)
        over = np.cumsum(there[..., self.last], axis=0) - there[..., self.last]
        found: np.ndarray = np.cumsum(there[..., begin], axis=0) - over
        return found

    def held_apart(self, stage: int, late: bool = False) -> tuple[int, int]:
        """Virtual stages of microbatches of which a stage with a program of its own holds values of forward,
        as `in_flight_apart`, and at the same time those that only the slots of weights read; `late`: when
        the most of these wait."""
        if not KINDS[self.kind].split:
            return self.in_flight_apart(stage), 0
        if KINDS[self.kind].order is None:  # as many wait as the stage has stages before it
            every = self.in_flight_apart(stage)
            return every, min(every, stage + 1)
        flying, waiting = (self._open(slot)[:, stage].tolist() for slot in list(StageAction)[:2])
        order = itemgetter(1, 0) if late else itemgetter(0, 1)
        found: tuple[int, int] = max(zip(flying, waiting, strict=True), key=order)
        return found

    @property
    def virtual(self) -> np.ndarray:
        """[stage, chunk]: which virtual stage it is; of the stream that takes it, if there are two."""
        return self.order.virtual

    def path(self, costs: np.ndarray) -> np.ndarray:
        """[slot, stage, chunk]: how many slots follow each other on the way that takes longest, if each stage
        has its own program: each waits for its inputs, or for the slot before it on its stage.

        Args:
          costs: seconds, [slot, virtual stage].
        """
        blocks = timed(self.table, self.virtual, costs, not KINDS[self.kind].one_way)
        found = np.zeros((len(StageAction), *self.virtual.shape), int)
        here = max(range(len(blocks)), key=lambda i: blocks[i].end)
        while here >= 0:
            for work in blocks[here].works:
                found[work] += 1
            here = blocks[here].before
        return found


def filled(of: PipelineSchedule, works: Sequence[tuple[int, int, StageWork]]) -> np.ndarray:
    """The table of some work, each with its tick and stage."""
    table = np.full((max(tick for tick, *_ in works) + 1, of.stages, len(StageAction), 2), IDLE, np.int32)
    for tick, stage, (slot, item, chunk) in works:
        table[tick, stage, slot] = item, chunk
    table.flags.writeable = False
    return table


def _in_order(of: PipelineSchedule) -> Iterator[tuple[int, int, StageWork]]:
    """The work of stages with orders of their own, each with its tick and stage."""
    kind, least = KINDS[of.kind], 2 if of.kind == "zb-v" else 2 * of.stages
    if of.microbatches < least or (kind.mirrored and (of.stages % 2 or of.microbatches % 2)):
        even = "the numbers of microbatches and stages must be even, and " if kind.mirrored else ""
        raise UserError(
            f"schedule {of.kind}: {even}the number of microbatches must be at least {least}"
            f"{', twice that of stages' * (least > 2)}; found {of.microbatches} microbatches and "
            f"{of.stages} stages"
        )
    assert kind.order is not None
    yield from ticks_of([kind.order(of.stages, s, of.microbatches) for s in range(of.stages)], of.virtual)


def _in_one_direction(of: PipelineSchedule) -> Iterator[tuple[int, int, StageWork]]:
    """The work of stages in other schedules."""
    kind, virtual, item = KINDS[of.kind], of.virtual[..., None], np.arange(of.microbatches)
    enters = item // of.stages * of.stages * of.chunks + item % of.stages
    ticks = {StageAction.FORWARD: enters + virtual}
    back, last = enters + 2 * virtual.max() - virtual, ticks[StageAction.FORWARD].max()
    ticks[StageAction.BACKWARD] = back if kind.at_once else 2 * last + 1 - ticks[StageAction.FORWARD]
    if kind.split:
        each = back.reshape(of.stages, -1)
        rank = each.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable").reshape(back.shape)
        ticks[StageAction.WEIGHTS] = rank + (back - rank).max()
    for slot, when in ticks.items():
        for (stage, chunk, item), tick in np.ndenumerate(when):
            yield int(tick), stage, (slot, item, chunk)
