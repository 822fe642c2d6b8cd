"""The speed of a candidate on a machine: the best layout of all, searched and proven.

A bound is known before any search: with every layout a device computes at least its share of the compute on
one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from costmodels.hardware import Hardware
from layoutopt.optimize.entry import search
from layoutopt.optimize.evaluation.evaluator import computed_alone
from layoutopt.optimize.problems.request import BEYOND
from layoutopt.plan.build import Plan
from layoutopt.runtime.clock import Clock
from layoutopt.sizing.family import SizeCandidate
from layoutopt.space import allow
from mesh_tf_core.errors import InfeasibleError, UserError
from mesh_tf_core.ir.mesh import MOST_DEVICES

USUAL_SHARE = 0.5
"""Part of a time limit for the usual layouts of all sizes, if everything is searched after them."""
LEAST = 3.0
"""Seconds in which layouts of all kinds are worth a look."""


@dataclass(frozen=True)
class OfferedHardware:
    """Requested hardware.

    Attributes:
      limit: bytes that a device may hold.
      price: of a chip-hour; None: not known.
    """

    name: str
    hardware: Hardware
    limit: float
    price: float | None = None


@dataclass(frozen=True)
class Timing:
    """A candidate on some devices of a machine.

    Attributes:
      step_seconds: of its best layout, or a bound that no layout is below; inf: nothing fits.
      plan: its best layout; None: nothing fits, or nothing was searched.
      reason: why nothing fits.
      usual: no search of its own for layouts of all kinds has followed yet.
    """

    candidate: SizeCandidate
    machine: OfferedHardware
    devices: int
    step_seconds: float
    plan: Plan | None = None
    reason: str = ""
    usual: bool = False

    @property
    def least(self) -> float:
        """Seconds that no searched layout takes less than, as far as that is proven."""
        assert self.plan is not None
        return max(self.plan.solver.bound or 0.0, math.ulp(self.step_seconds))

    @property
    def tokens_per_second(self) -> float:
        return self.candidate.tokens / self.step_seconds


class Timer:
    """Times candidates, each on some devices once.

    Args:
      clock: when to end.
      share: the part of the time left that the next search may take.
      allowed: further choices of `search`, as its keywords.

    Attributes:
      usual: without words about choices, the usual layouts are searched; `everything` goes on from these.
      clock: of the searches of now: where `everything` follows, the usual ones have a part of the limit.
    """

    def __init__(self, max_axes: int, clock: Clock, allowed: Mapping[str, Any] | None = None) -> None:
        self.max_axes, self.clock, self.allowed, self.share = max_axes, clock, dict(allowed or {}), 1.0
        self.usual = not (allow.unsaid() or "allow" in self.allowed)
        # Within a limit each search goes on to everything: it may find no usual layout in its part.
        self._words = allow.unsaid() or (allow.USUAL if clock.limit is None else ())
        self._whole, self._beyond = clock, Clock(0.0)
        if self.usual and clock.limit is not None:
            self.clock = Clock(USUAL_SHARE * clock.limit, clock.start)
        self.known: dict[tuple[int, str, int], Timing] = {}
        self._alone: dict[tuple[int, str], float] = {}

    def __call__(self, candidate: SizeCandidate, machine: OfferedHardware, devices: int) -> Timing:
        """The best layout; LimitError if there was no time to find one."""
        key = id(candidate), machine.name, devices
        if key not in self.known:
            self.known[key] = self._searched(candidate, machine, devices)
        return self.known[key]

    def at_best(self, candidate: SizeCandidate, machine: OfferedHardware, devices: int) -> Timing:
        """The seconds below which no layout is: every device computes its share alone, and waits for
        nothing."""
        key = id(candidate), machine.name
        if key not in self._alone:
            self._alone[key] = computed_alone(candidate.model, machine.hardware)
        return Timing(candidate, machine, devices, self._alone[key] / devices)

    def widen(self) -> None:
        """From here on all the time is used; without a limit, `BEYOND` seconds for layouts of all kinds."""
        self.clock = self._whole
        self._beyond = self.clock if self.clock.limit is not None else Clock(BEYOND)

    def hurry(self) -> None:
        """Leaves no time."""
        for clock in (self.clock, self._whole, self._beyond):
            clock.hurry()

    @property
    def goes_on(self) -> bool:
        """True if there is time for layouts of all kinds."""
        return self.usual and (self._beyond.left or 0.0) > LEAST

    def everything(self, timing: Timing, share: float) -> Timing:
        """The same with layouts of all kinds, in a part of the time for all of these."""
        more = self._better(timing, allow=allow.EVERYTHING, time_limit=self._beyond.part(share))
        return replace(more, usual=False)

    def longer(self, timing: Timing) -> Timing:
        """The same with the layouts of its own search, which did not end."""
        return self._better(timing)

    def _better(self, timing: Timing, **more: Any) -> Timing:
        found = timing
        with suppress(UserError):
            if timing.plan is not None:
                found = self._searched(
                    timing.candidate, timing.machine, timing.devices, start=timing.plan, **more
                )
        return min(found, timing, key=lambda each: each.step_seconds)

    def _searched(
        self, candidate: SizeCandidate, machine: OfferedHardware, devices: int, **more: Any
    ) -> Timing:
        part = self.clock if self.share == 1 else self.clock.part(self.share)
        try:
            plan = search(
                candidate.model,
                devices=devices,
                hardware=machine.hardware,
                memory=machine.limit,
                max_axes=self.max_axes,
                alternatives=False,
                **{"time_limit": part, "allow": self._words, **self.allowed, **more},
            )
        except InfeasibleError as error:
            return Timing(candidate, machine, devices, math.inf, reason=str(error))
        return Timing(candidate, machine, devices, plan.predicted.step_seconds, plan, usual=self.usual)


def fewest(candidate: SizeCandidate, machine: OfferedHardware) -> int:
    """Devices, a power of two, that fewer cannot do with: their memory does not hold the variables."""
    held = sum(v.bytes for v in candidate.model.graph.variables.values())
    return min(2 ** max(0, math.ceil(math.log2(held / machine.limit))), MOST_DEVICES)
