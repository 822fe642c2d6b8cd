"""The rows of a sizing: results of a size on several numbers of devices, the choice of those worth a search,
and why a question has no row: proven, or not searched in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.hardware import GpuCluster
from layoutopt.plan.size_results import Unfit
from layoutopt.plan.training import lasts
from layoutopt.plan.units import count
from layoutopt.sizing.family import SizeCandidate
from layoutopt.sizing.question import DAY
from layoutopt.sizing.timing import Timing
from mesh_tf_core.errors import InfeasibleError, LimitError, NoLayoutError

NEAR_LOSS, NEAR_COST = 0.01, 1.1
"""Nats per token above the best, and times the least cost, that are called flat."""
SAME = 1e-9
"""Relative difference that rounding makes."""
_UNSEARCHED = "some sizes were not searched within the time limit; raise --time-limit"


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

    def facts(self) -> dict[str, Any]:
        """The part of it that results have, searched or not."""
        return {
            "parameters": int(self.candidate.size.total),
            "hardware": self.timing.machine.name,
            "devices": self.timing.devices,
            "loss": self.loss,
            "step_seconds": self.timing.step_seconds,
            "days": self.days,
            "chip_hours": self.chip_hours,
            "money": self.money,
        }

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


def nothing(unfit: Sequence[Unfit], missing: int) -> NoLayoutError | LimitError:
    """The error of a question without any row; `missing`: searches for which there was no time."""
    if missing and not unfit:
        return LimitError("no size was searched within the time limit; raise --time-limit")
    none, near = f"none of the {len(unfit)} searched candidates meets the target", unfit[0]
    if missing:
        return LimitError(f"{none}, and {_UNSEARCHED}")
    place = f"{count(near.parameters)} parameters on {near.devices:,} {near.hardware}"
    return InfeasibleError(f"{none}; for example, with {place}: {near.reason}")


def all_late(
    days: float, rows: Sequence[SizeRow], unended: Sequence[SizeRow], missing: int
) -> NoLayoutError | LimitError:
    """The error where no row ends in time; `unended`: those that may, by the bounds of searches that did not
    end."""
    soonest = min(rows, key=lambda r: r.days)
    fastest = f"the fastest, {_place(soonest)}, takes {lasts(DAY * soonest.days)}"
    late = f"none of the searched sizes ends within {days:g} days"
    if unended:
        return LimitError(
            f"{late} ({fastest}), but the search of {', '.join(map(_place, unended))} did not end, and "
            "faster layouts may meet it; raise --time-limit"
        )
    if missing:
        return LimitError(f"{late}, and {_UNSEARCHED}")
    assert soonest.timing.plan is not None
    parts = ", ".join(map(str, soonest.timing.plan.question.microbatches))
    return InfeasibleError(
        f"--days {days:g}: no candidate is fast enough; {fastest} (with {parts} microbatches: no other "
        "number was tried); allow more days, or offer more or faster devices (--devices, --hardware)"
    )


def _place(row: SizeRow) -> str:
    return f"{count(row.candidate.size.total)} parameters on {row.timing.devices:,} {row.timing.machine.name}"
