"""Orders of slots that stages follow where each has a program of its own, and the ticks of these slots; and
the order in which stages store layers.

  zero_bubble_v  two virtual stages a stage, down the stages and up again, so that every stage has as much in
                 flight (Qi et al. 2023, "Zero bubble pipeline parallelism", section 6; in PyTorch:
                 torch.distributed.pipelining.ScheduleZBVZeroBubble)
  dualpipe_v     the same placement, forward and backward slots in one block (DeepSeek-AI 2025, "DualPipe";
                 in PyTorch: ScheduleDualPipeV)
  dualpipe       two streams of microbatches in opposite directions, each stage with the layers of two: the
                 stages of each half of the pipeline follow `dualpipe_v` (DeepSeek-AI 2024, "DeepSeek-V3",
                 section 3.2.1)

An order names slots and virtual stages; each of these takes microbatches by their numbers.

A stage of a pipeline (`ir.schedules`) with several virtual stages has layers that do not lie next to each
other. So that its device holds these and no others, layers lie stage after stage, and in each virtual stage
after virtual stage. Where some of these have a layer less, they are padded with zeros. Only devices use this
order: values that are read, written, saved and initialised have the model's order.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from mesh_tf_core.errors import UserError

IDLE = -1


class StageAction(IntEnum):
    """The action of a stage in a part of a tick."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHTS = 2


StageWork = tuple[StageAction, int, int]
"""A slot, its microbatch, and the virtual stage of the stage."""
Order = list[list[StageWork]]
"""The work of a stage by ticks: what a tick has is one block, whose results leave the stage at its end."""
SlotBlocks = list[list[tuple[StageAction, int]]]
F0, B0, W0 = ((slot, 0) for slot in StageAction)
F1, B1, W1 = ((slot, 1) for slot in StageAction)


def zero_bubble_v(stages: int, stage: int, microbatches: int) -> Order:
    """The order of a stage in ZB-V."""
    every, left = max(2 * stages - 1, microbatches), stages - stage
    found = [F0] * (2 * left - 1) + [F1, F0] * stage + [F1, B1, W1] * left
    found += [F0, B0, W0, F1, B1, W1] * (every - stages - left + 1) + [B0, W0, F1, B1, W1] * (left - 1)
    found += [B0, B1] * stage + [B0, W0] * left + [W1] * stage + [W0] * stage
    return _numbered([[slot] for slot in found], microbatches)


def dualpipe_v(stages: int, stage: int, microbatches: int) -> Order:
    """The order of a stage in DualPipeV."""
    left, steady = stages - stage - 1, microbatches - 2 * stages + stage + 1
    found: SlotBlocks = [[F0]] * (2 * left) + [[F0], [F1]] * (stage + 1) + [[B1], [W1], [F1]] * left
    found += [[F0, B1, W1], [F1, B0, W0]] * steady + [[B1, W1], [F1, B0, W0]] * left
    if not left and steady:
        found[2 * stages : 2 * stages + 1] = [F0], [B1, W1]  # its results are the last stage's own inputs
    late: SlotBlocks = []
    for at in range(2 * (stage + 1)):
        back, weights = (B0, W0) if at % 2 else (B1, W1)
        found.append([back] if at > stage else [back, weights])
        late += [[weights]] * (at > stage)
    for at in range(left):
        found += [late[at], [B0]]
        late.append([W0])
    return _numbered(found + late[left:], microbatches)


def dualpipe(stages: int, stage: int, microbatches: int) -> Order:
    """The order of a stage in DualPipe: the stream of odd microbatches enters at the last stage."""
    turned = 2 * stage >= stages
    half = dualpipe_v(stages // 2, stages - 1 - stage if turned else stage, microbatches // 2)
    return [
        [(slot, 2 * item + (chunk ^ turned), chunk ^ turned) for slot, item, chunk in each] for each in half
    ]


def _numbered(found: SlotBlocks, microbatches: int) -> Order:
    """Slots with their microbatches, those that there are."""
    counts, made = Counter[tuple[StageAction, int]](), list[list[StageWork]]()
    for block in found:
        made.append([])
        for slot, chunk in block:
            item = counts[slot, chunk]
            counts[slot, chunk] += 1
            made[-1] += [(slot, item, chunk)] if item < microbatches else []
    return [block for block in made if block]


def needed(slot: StageAction, virtual: int, last: int) -> tuple[StageAction, int]:
    """The slot, of the same microbatch, and the virtual stage whose result a slot takes; -1: none."""
    if slot is StageAction.FORWARD:
        return slot, virtual - 1
    if slot is StageAction.BACKWARD:
        return (slot, virtual + 1) if virtual < last else (StageAction.FORWARD, virtual)
    return StageAction.BACKWARD, virtual


def ticks_of(orders: Sequence[Order], virtual: np.ndarray) -> Iterator[tuple[int, int, StageWork]]:
    """The first tick in which each stage can do each block: (tick, stage, work)."""
    done, last = dict[tuple[StageAction, int, int], int](), int(virtual.max())
    at, now, moves = [0] * len(orders), [-1] * len(orders), True
    while moves:
        moves = False
        for stage, order in enumerate(orders):
            for block in order[at[stage] :]:
                own = {(slot, int(virtual[stage, chunk]), item) for slot, item, chunk in block}
                takes = {(*needed(slot, v, last), item) for slot, v, item in own} - own
                takes = {key for key in takes if key[1] >= 0}
                if not takes <= done.keys():
                    break
                tick = now[stage] = 1 + max((now[stage], *(done[key] for key in takes)))
                done.update(dict.fromkeys(own, tick))
                at[stage], moves = at[stage] + 1, True
                yield from ((tick, stage, work) for work in block)
    assert all(n == len(order) for n, order in zip(at, orders, strict=True)), "stages wait for each other"


def fitted(spans: Iterable[tuple[int, int]]) -> Iterator[int]:
    """The first place that is free from one tick to another; spans in the order in which they begin."""
    free, most, taken = list[int](), itertools.count(), list[tuple[int, int]]()
    for begin, end in spans:
        while taken and taken[0][0] < begin:
            heapq.heappush(free, heapq.heappop(taken)[1])
        place = heapq.heappop(free) if free else next(most)
        heapq.heappush(taken, (end, place))
        yield place


class TimedBlock(NamedTuple):
    """Slots that a stage does without a break, if each stage has a program of its own.

    Attributes:
      end: seconds at which it ends.
      before: the block that it waits for, by its number; -1: none.
      works: slot, stage and chunk.
    """

    end: float
    before: int
    works: Sequence[tuple[int, int, int]]


def timed(
    table: np.ndarray, virtual: np.ndarray, costs: np.ndarray, blocks_of_ticks: bool
) -> list[TimedBlock]:
    """The blocks of a table, each as soon as its inputs arrive.

    Args:
      virtual: [stage, chunk]; `costs`: [slot, virtual stage].
      blocks_of_ticks: what a stage has in a tick is one block; else each slot is.
    """
    free, blocks = [-1] * len(virtual), list[TimedBlock]()
    done, last = dict[tuple[int, int, int], int](), int(virtual.max())
    works = np.argwhere(table[..., 0].transpose(0, 2, 1) != IDLE).tolist()
    works = sorted(works, key=itemgetter(0, 2)) if blocks_of_ticks else works
    for _, block in itertools.groupby(works, itemgetter(0, 2) if blocks_of_ticks else tuple):
        takes, makes = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        slots, seconds = list[tuple[int, int, int]](), 0.0
        for tick, slot, stage in block:
            item, chunk = table[tick, stage, slot].tolist()
            at = int(virtual[stage, chunk])
            takes.append((*needed(StageAction(slot), at, last), item))
            makes.append((slot, at, item))
            slots.append((slot, stage, chunk))
            seconds += float(costs[slot, at])
        # Of equal ways, the one that stays at its stage.
        come = [free[stage], *(done.get(each, -1) for each in takes)]
        before = max(come, key=lambda i: blocks[i].end if i >= 0 else 0.0)
        free[stage] = len(blocks)
        done.update(dict.fromkeys(makes, free[stage]))
        blocks.append(TimedBlock((blocks[before].end if before >= 0 else 0.0) + seconds, before, slots))
    return blocks


def _when(table: np.ndarray, slot: StageAction) -> dict[tuple[int, int, int], int]:
    """Stage, microbatch and chunk -> the tick of their slot, in the order of ticks."""
    there = np.argwhere(table[..., slot, 0] != IDLE).tolist()
    return {(stage, *table[tick, stage, slot].tolist()): tick for tick, stage in there}


def places_of(table: np.ndarray, begin: StageAction, last: StageAction) -> np.ndarray:
    """`PipelineSchedule.places` of a table; `last`: the slot that ends a virtual stage."""
    # Idle slots take forward values that are numbers, and zeros as gradients: no gradient comes of these.
    places = np.full(table.shape[:3], 0 if begin is StageAction.FORWARD else IDLE, np.int32)
    places[..., begin], lies = IDLE, dict[tuple[int, int, int], int]()
    begins, ends = _when(table, begin), _when(table, last)
    for _, found in itertools.groupby(sorted(begins, key=itemgetter(0)), itemgetter(0)):
        own = [*found]
        lies.update(zip(own, fitted((begins[key], ends[key]) for key in own), strict=True))
    for slot in list(StageAction)[begin:]:
        for key, tick in _when(table, slot).items():
            places[tick, key[0], slot] = lies[key]
    return places


def arrivals_of(table: np.ndarray, virtual: np.ndarray, slot: StageAction) -> np.ndarray:
    """`PipelineSchedule.arrivals` of a table."""
    when = {(virtual[s, chunk], item): (tick, s) for (s, item, chunk), tick in _when(table, slot).items()}
    found = np.full((*table.shape[:2], 3), IDLE, np.int32)
    step = -1 if slot is StageAction.BACKWARD else 1
    come = ((*at, *when[v + step, m]) for (v, m), at in when.items() if (v + step, m) in when)
    for stage, each in itertools.groupby(sorted(come, key=itemgetter(3)), itemgetter(3)):
        here = [*each]
        places = fitted((tick + 1, then) for tick, _, then, _ in here)
        for (tick, source, then, _), place in zip(here, places, strict=True):
            found[tick, stage, int(source >= stage)] = found[then, stage, 2] = place
    return found


PADDING = -1
UNEQUAL = re.compile(r"|(first|last|first=\d{1,4}:last)=\d{1,4}|layers=\d{1,4}(\+\d{1,4})*")
"""The layers of the first or last stage, or of every virtual stage in the model's order."""


@dataclass(frozen=True)
class Interleaved:
    """The order of the first dimension, of P stages with R virtual stages each: virtual stage r of stage p is
    number r P + p of the model's; with `turns`, every second round runs up the stages; `mirrored`, a stage
    also has a copy of the layers of the one as far from the other end. Stages without a full number of layers
    are at both ends, which also compute embedding and head; or where the layers of stages are given
    (`unequal`, as `UNEQUAL`)."""

    stages: int
    rounds: int
    unequal: str = ""
    turns: bool = False
    mirrored: bool = False

    @property
    def chunks(self) -> int:
        """Virtual stages of a stage, with copies."""
        return self.rounds * (1 + self.mirrored)

    @property
    def virtual(self) -> np.ndarray:
        """[stage, chunk]: which virtual stage it is."""
        stage, chunk = np.indices((self.stages, self.chunks))
        up = (chunk % 2 == 1) & (self.turns or self.mirrored)
        return chunk % self.rounds * self.stages + np.where(up, self.stages - 1 - stage, stage)

    @property
    def given(self) -> dict[str, int]:
        """The layers of the first and the last stage, where these are given."""
        said = self.unequal if self.unequal.startswith(("first", "last")) else ""
        return {name: int(n) for name, n in (part.split("=") for part in said.split(":") if part)}

    def counts(self, layers: int) -> np.ndarray:
        """The layers of each virtual stage, in the model's order; UserError if those that are given are not
        all layers."""
        parts = self.stages * self.rounds
        if self.unequal.startswith("layers="):
            found = np.array([*map(int, self.unequal.removeprefix("layers=").split("+"))])
        elif self.given:
            found = self._between_ends(layers)
        else:
            both = np.stack([np.arange(parts)[::-1], np.arange(parts)], axis=1).reshape(-1)
            found = np.full(parts, -(-layers // parts))
            found[both[: -layers % parts]] -= 1
        if len(found) != parts or found.sum() != layers or found.min() < 0:
            raise UserError(f"{self.unequal}: {self._unfit(layers, found)}")
        return found

    def _unfit(self, layers: int, found: np.ndarray) -> str:
        """Why the layers that are given cannot be those of the stages, and which can."""
        each = f" of {self.rounds} virtual stages" if self.rounds > 1 else ""
        if not self.given:
            return (
                f"these are {found.sum()} layers in {len(found)} parts; the model has {layers} layers for "
                f"{self.stages} stages{each}; write {self.stages * self.rounds} numbers with the sum {layers}"
            )
        name, (old, *_) = next(iter(self.given)), self.given.values()
        texts = (self.unequal.replace(f"{name}={old}", f"{name}={n}") for n in range(layers))
        others = (replace(self, unequal=text) for text in texts)
        fits = [o for o in others if (own := o._between_ends(layers)).sum() == layers and own.min() >= 0]
        near = sorted(fits, key=lambda o: (abs(o.given[name] - old), o.given[name]))[:2]
        do = " or ".join(o.unequal for o in near) or "the layers of every stage, layers=N+N+..."
        left, many = layers - sum(self.given.values()), self.stages - len(self.given)
        return (
            f"it leaves {left} of the model's {layers} layers to the other {many} of {self.stages} stages"
            f"{each}, which share them equally; write {do}"
        )

    def _between_ends(self, layers: int) -> np.ndarray:
        """Stages between those that are given share the other layers equally."""
        ends = {"first": 0, "last": self.stages - 1}
        given = {ends[name]: number for name, number in self.given.items()}
        each = (layers - sum(given.values())) // max(self.stages - len(given), 1)
        own = np.array([given.get(stage, each) // self.rounds for stage in range(self.stages)])
        return own[np.argsort(self.virtual[:, : self.rounds], axis=None) // self.rounds]

    def of_stages(self, layers: int) -> np.ndarray:
        """[stage, chunk]: their layers."""
        return self.counts(layers)[self.virtual]

    def size(self, layers: int) -> int:
        """The number of places that these layers take."""
        return int(self.counts(layers).max()) * self.stages * self.chunks

    def moves(self, layers: int) -> bool:
        """True if layers lie otherwise than the model has them."""
        return self.chunks > 1 or self.lacks(layers) > 0

    def lacks(self, layers: int) -> int:
        """How many places have no layer."""
        return int(np.count_nonzero(self.numbers(layers) == PADDING))

    def numbers(self, layers: int) -> np.ndarray:
        """[stage, place]: the model's number of the layer at that place; PADDING if there is none."""
        counts = self.counts(layers)
        begins, inside = np.cumsum(counts) - counts, np.arange(counts.max())
        found = np.where(inside < counts[:, None], begins[:, None] + inside, PADDING)
        return found[self.virtual].reshape(self.stages, -1)

    def runs(self, layers: int, begin: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The runs of layers, contiguous in the model, that follow each other in storage from one place on.

        Args:
          begin, count: of the places.

        Returns:
          For each run: its first layer, the number of layers, and their distance behind `begin`.
        """
        numbers = self.numbers(layers).reshape(-1)[begin : begin + count]
        breaks = np.flatnonzero((np.diff(numbers) != 1) | (numbers[:-1] == PADDING)) + 1
        for places in np.split(np.arange(count), breaks):
            if numbers[places[0]] != PADDING:
                yield int(numbers[places[0]]), len(places), int(places[0])
