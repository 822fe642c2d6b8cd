r"""Times of a step on a machine that others may be using as well.

A sample has the wall time of a few steps, the CPU time of this process (or of all that run the program
together, `combined`), and the CPU time of everyone else.
On an idle machine the wall time is the answer. On a shared one, waiting for others is not a property of the
program:

(1) one sample: seconds = max(wall - foreign / cores, own / cores)
(2) several: median of own / cores, times (1) of their totals / (own / cores of their totals)

The factor in (2) is the time that cores have nothing to do in a step. Only totals are long enough for it,
because a system counts others' CPU time in ticks of about 10 ms, while a process's own is exact. (1) is
right when a program keeps all cores busy, as steps of virtual devices nearly do, and a lower bound
otherwise. `ClockNoise` has the share of the machine that other processes used, and the spread of repeats.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

from mesh_tf_core.cores import cores
from mesh_tf_core.reading import read_text

_STAT = Path("/proc/stat")
QUIET = 0.02
"""Share of the machine's cores that others may have before their time is taken off."""
FOREIGN = 0.10
"""Share of the machine's cores that others may have before it counts as noisy."""
SPREAD = 0.10
"""Interquartile range of repeats, relative to their median, above which a machine counts as noisy."""


@dataclass(frozen=True, slots=True)
class TimingSample:
    """One run of `steps` steps: seconds of wall time, of the program's CPU time, of everyone else's."""

    wall: float
    own: float
    foreign: float
    cores: int
    steps: int = 1

    @property
    def seconds(self) -> float:
        """Seconds of a step on an idle machine, equation (1)."""
        return max(self.wall - self.foreign / self.cores, self.own / self.cores) / self.steps

    @property
    def foreign_share(self) -> float:
        """Share of the cores that others used."""
        return min(1.0, self.foreign / (self.wall * self.cores)) if self.wall > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ClockNoise:
    """The reliability of a measurement.

    Attributes:
      foreign: median share of the cores that other processes used.
      spread: typical interquartile range of repeats, relative to their median.
    """

    foreign: float
    spread: float

    @property
    def noisy(self) -> bool:
        return self.foreign > FOREIGN or self.spread > SPREAD

    @property
    def words(self) -> str:
        state = "noisy" if self.noisy else "quiet"
        text = f"{state} machine: other processes used {self.foreign:.0%} of the cores, "
        text += f"and repeated measurements differed by {self.spread:.1%}"
        return text + ("; close other programs and measure again for reliable numbers" if self.noisy else "")


def sample(run: Callable[[], object], steps: int = 1) -> TimingSample:
    """Runs `steps` steps."""
    ended = started()
    for _ in range(steps):
        run()
    return ended(steps)


def started() -> Callable[[int], TimingSample]:
    """Starts a sample; the returned function ends it, after so many steps."""
    busy, own, wall = _busy(), time.process_time(), time.perf_counter()

    def ended(steps: int) -> TimingSample:
        took, used, now = time.perf_counter() - wall, time.process_time() - own, _busy()
        foreign = 0.0 if busy is None or now is None else max(0.0, now - busy - used)
        return TimingSample(took, used, foreign, cores(), steps)

    return ended


def combined(samples: Sequence[TimingSample], hosts: Sequence[str]) -> TimingSample:
    """One sample of processes that ran the same steps together, from each one's own.

    The wall time is the first one's. Processes of one machine do not count as others to each other. Of
    several machines that counts which others use most, since the rest waits for it.

    Args:
      hosts: each one's machine.
    """
    found: dict[str, list[TimingSample]] = {}
    for one, host in zip(samples, hosts, strict=True):
        found.setdefault(host, []).append(one)
    worst = max(map(_of_machine, found.values()), key=lambda s: s.foreign_share)
    return replace(worst, wall=samples[0].wall)


def _of_machine(samples: Sequence[TimingSample]) -> TimingSample:
    """What the first takes for others' CPU time is the other processes' in part."""
    first, *rest = samples
    theirs = sum(s.own for s in rest)
    return replace(first, own=first.own + theirs, foreign=max(0.0, first.foreign - theirs))


def steps_for(run: Callable[[], object], seconds: float) -> int:
    """The number of steps that take about `seconds`, from one step."""
    start = time.perf_counter()
    run()
    return max(1, min(200, round(seconds / max(time.perf_counter() - start, 1e-6))))


def typical(samples: Sequence[TimingSample]) -> float:
    """Seconds of a step: the median on a quiet machine, equation (2) on a shared one."""
    wall, own, foreign = (sum(getattr(s, n) for s in samples) for n in ("wall", "own", "foreign"))
    count = samples[0].cores
    if foreign <= QUIET * wall * count or own <= 0:
        return median(s.seconds for s in samples)
    busy = own / count
    return median(s.own / s.steps for s in samples) / count * max(1.0, (wall - foreign / count) / busy)


def repeats_spread(samples: Sequence[TimingSample]) -> float:
    """Spread of the repeats: of seconds on a quiet machine, of this process's CPU time on a shared one."""
    shared = median(s.foreign_share for s in samples) > QUIET
    return spread([s.own / s.steps if shared else s.seconds for s in samples])


def spread(values: Sequence[float]) -> float:
    """Interquartile range relative to the median; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def noise(groups: Sequence[Sequence[TimingSample]]) -> ClockNoise:
    """The noise of repeated measurements of several things, one sequence for each."""
    everything = [s for group in groups for s in group]
    if not everything:
        return ClockNoise(0.0, 0.0)
    spreads = [repeats_spread(group) for group in groups if len(group) > 1]
    return ClockNoise(median(s.foreign_share for s in everything), median(spreads) if spreads else 0.0)


def _busy() -> float | None:
    """CPU seconds that all processes of this machine have used; None where the system does not tell."""
    try:
        words = read_text(_STAT).split("\n", 1)[0].split()
    except OSError:
        return None
    ticks = [int(w) for w in words[1:9]]
    # Guests are counted in user time already; idle and waiting for disks are no work.
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
