"""How fast a candidate trains on a machine: the best layout of all, searched and proven."""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodels.hardware import Hardware
from layoutopt.api import search
from layoutopt.clock import Clock
from layoutopt.plan.build import Plan
from layoutopt.sizing.family import Candidate
from layoutopt.space.microbatches import USUAL
from mesh_tf_core.errors import InfeasibleError
from mesh_tf_core.ir.mesh import MOST_DEVICES


@dataclass(frozen=True)
class Machine:
    """Hardware as it was asked for.

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
      plan: its best layout; None: nothing fits.
      reason: why.
    """

    candidate: Candidate
    machine: Machine
    devices: int
    plan: Plan | None
    reason: str = ""

    @property
    def step_seconds(self) -> float:
        return math.inf if self.plan is None else self.plan.predicted.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.candidate.tokens / self.step_seconds


class Timer:
    """Times candidates, each on some devices once.

    Args:
      clock: when to end.
    """

    def __init__(self, max_axes: int, clock: Clock) -> None:
        self.max_axes, self.clock = max_axes, clock
        self.known: dict[tuple[int, str, int], Timing] = {}

    def __call__(self, candidate: Candidate, machine: Machine, devices: int) -> Timing:
        """The best layout; LimitError if there was no time to find one."""
        key = id(candidate), machine.name, devices
        if key not in self.known:
            self.known[key] = self._searched(candidate, machine, devices)
        return self.known[key]

    def _searched(self, candidate: Candidate, machine: Machine, devices: int) -> Timing:
        try:
            plan = search(
                candidate.model,
                devices=devices,
                hardware=machine.hardware,
                memory=machine.limit,
                max_axes=self.max_axes,
                time_limit=self.clock,
                microbatches=USUAL,
                alternatives=False,
            )
        except InfeasibleError as error:
            return Timing(candidate, machine, devices, None, str(error))
        return Timing(candidate, machine, devices, plan)


def fewest(candidate: Candidate, machine: Machine) -> int:
    """Devices, a power of two, that fewer cannot do with: their memory does not hold the variables."""
    held = sum(v.bytes for v in candidate.model.graph.variables.values())
    return min(2 ** max(0, math.ceil(math.log2(held / machine.limit))), MOST_DEVICES)
