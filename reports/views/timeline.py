"""The memory timeline, thinned so that no peak is lost, and its phases."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from layoutopt.plan.details import MemoryTimeline

MOST = 240
"""Steps that a figure 400 pixels wide can still show."""
LEAST = 0.22
"""Part of the axis that a phase has at least: room for its name."""


@dataclass(frozen=True)
class HoldingGroup:
    """Tensors alive at the peak that look the same, and the bytes of them all on one device."""

    what: str
    bytes: float
    scope: str
    alike: int

    @property
    def name(self) -> str:
        return f"{self.what} × {self.alike}" if self.alike > 1 else self.what


def holdings_at_peak(memory: MemoryTimeline) -> tuple[HoldingGroup, ...]:
    """Tensors that look the same are one holding; the largest first."""
    found = Counter((h.what, h.scope, h.bytes) for h in memory.holdings)
    rows = [HoldingGroup(what, size * n, scope, n) for (what, scope, size), n in found.items()]
    return tuple(sorted(rows, key=lambda h: -h.bytes))


@dataclass(frozen=True)
class PhaseSpan:
    """Consecutive instructions of one phase, as positions [start, end) in the program."""

    name: str
    start: int
    end: int


def thinned(memory: MemoryTimeline, most: int = MOST) -> tuple[tuple[int, float], ...]:
    """(position, bytes): of every stretch of the program, its highest and its lowest point in their order."""
    points = memory.points
    if len(points) <= most:
        return tuple((i, p.bytes) for i, p in enumerate(points))
    stretches = most // 2
    kept: set[int] = {memory.peak, 0, len(points) - 1}
    for s in range(stretches):
        span = range(s * len(points) // stretches, (s + 1) * len(points) // stretches)
        kept.add(max(span, key=lambda i: points[i].bytes))
        kept.add(min(span, key=lambda i: points[i].bytes))
    return tuple((i, points[i].bytes) for i in sorted(kept))


def phases(memory: MemoryTimeline) -> tuple[PhaseSpan, ...]:
    """The program's phases in order; a short phase between long phases of one name belongs to them."""
    runs: list[PhaseSpan] = []
    for i, point in enumerate(memory.points):
        if runs and runs[-1].name == point.phase:
            runs[-1] = PhaseSpan(point.phase, runs[-1].start, i + 1)
        else:
            runs.append(PhaseSpan(point.phase, i, i + 1))
    shortest = len(memory.points) * 0.02
    merged: list[PhaseSpan] = []
    for run in runs:
        if merged and (run.end - run.start < shortest or merged[-1].name == run.name):
            merged[-1] = PhaseSpan(merged[-1].name, merged[-1].start, run.end)
        else:
            merged.append(run)
    return tuple(p for p in merged if p.name)


def total_seconds(memory: MemoryTimeline) -> float:
    """Seconds of the step's instructions; 0 if the plan does not have them."""
    return sum(p.seconds for p in memory.points)


def placed(memory: MemoryTimeline) -> Callable[[float], float]:
    """Position in the program -> place on an axis from 0 to 1: of time, where the plan has it."""
    whole = total_seconds(memory)
    if not whole:
        return stretched(memory)
    begins = [0.0, *accumulate(p.seconds / whole for p in memory.points)]

    def place(position: float) -> float:
        i = min(int(position), len(memory.points) - 1)
        return min(begins[i] + (position - i) * (begins[i + 1] - begins[i]), 1.0)

    return place


def stretched(memory: MemoryTimeline) -> Callable[[float], float]:
    """Position in the program -> place on an axis from 0 to 1 on which every phase has room for its name.

    Positions count instructions, not time, so a phase of few instructions may well be drawn wider than its
    share. Phases that are too many for that, or that leave gaps, keep their shares.
    """
    found, total = phases(memory), max(len(memory.points), 1)
    whole = [p.start for p in found] + [total] == [0, *(p.end for p in found)]
    if not whole or len(found) * LEAST > 1:
        return lambda position: position / total
    widths = [max((p.end - p.start) / total, LEAST) for p in found]
    starts = [0.0, *accumulate(w / sum(widths) for w in widths)]

    def place(position: float) -> float:
        i = min(bisect_right([p.start for p in found], position), len(found)) - 1
        phase = found[i]
        return starts[i] + (position - phase.start) / (phase.end - phase.start) * (starts[i + 1] - starts[i])

    return place
