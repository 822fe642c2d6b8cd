"""The rows of a sizing: results of a size on several numbers of devices, and the choice of those worth a
search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from costmodels.hardware import GpuCluster
from layoutopt.sizing.family import SizeCandidate
from layoutopt.sizing.timing import Timing

NEAR_LOSS, NEAR_COST = 0.01, 1.1
"""Nats per token above the best, and times the least cost, that are called flat."""
SAME = 1e-9
"""Relative difference that rounding makes."""


@dataclass(frozen=True)
class SizeRow:
    """A timing with the training that the question requires."""

    timing: Timing
    tokens: float
    loss: float
    days: float
    chip_hours: float
    money: float | None
    cost: float

    @property
    def candidate(self) -> SizeCandidate:
        return self.timing.candidate

    @property
    def per_token(self) -> float:
        return self.cost / self.tokens

    @property
    def place(self) -> tuple[str, int]:
        """The machine and its devices."""
        return self.timing.machine.name, self.timing.devices

    def beats(self, other: SizeRow) -> bool:
        """True if it is better in loss, days or cost, and worse in none."""
        mine, its = (self.loss, self.days, self.cost), (other.loss, other.days, other.cost)
        ratios = [x / y for x, y in zip(mine, its, strict=True)]
        return max(ratios) <= 1 + SAME and min(ratios) < 1 - SAME

    def near(self, best: SizeRow, by_cost: bool) -> bool:
        """True if it is nearly as good; `by_cost`: all have the same loss."""
        return self.cost <= NEAR_COST * best.cost if by_cost else self.loss <= best.loss + NEAR_LOSS


def whole_nodes(row: SizeRow, factors: Iterable[float]) -> list[int]:
    """So many times a row's number of devices, where that fills nodes of its hardware."""
    topology, own = row.timing.machine.hardware.topology, row.timing.devices
    if not isinstance(topology, GpuCluster):
        return []
    return [int(own * each) for each in factors if own * each % topology.node_size.value == 0]


def frontier(rows: Iterable[SizeRow]) -> set[int]:
    """Ids of the rows that no other beats."""
    every = [*rows]
    return {id(r) for r in every if not any(other.beats(r) for other in every)}
