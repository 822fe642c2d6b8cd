"""Local search in parallel with other work: its answers and bounds go to the incumbent of the whole
problem."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from layoutopt.runtime.clock import Clock
from layoutopt.runtime.own_process import OtherProcess, processes
from layoutopt.solver.anytime.network import ROUNDED, Network
from layoutopt.solver.anytime.search import LocalSearch
from layoutopt.solver.form import Choices
from layoutopt.solver.incumbent import Incumbent
from layoutopt.solver.lagrangian import whole

PART = 0.1
"""The fraction of the time that evaluating answers may take."""
REST = 0.1
"""Seconds that are left over."""
WORTH = 5.0
"""Seconds that have to be left for a partner to be started."""
FADED = 0.9
"""The decay of the longest step's seconds with each further step."""
PARTNER = "layoutopt.solver.anytime.partner_process"
IDLE = 0.05
"""Seconds to wait where there is nothing to do."""


class Improver:
    """Steps of local search on a network; `lift` converts its choices to those of the incumbent's problem."""

    def __init__(
        self, incumbent: Incumbent, network: Network, lift: Callable[[Choices], Choices], clock: Clock
    ) -> None:
        self.incumbent, self.lift, self.clock = incumbent, lift, clock
        self.whole = whole(incumbent.problem)
        self.search = LocalSearch(network, 0)
        self.told, self.again, self.seconds, self.stepped = math.inf, 0.0, 0.0, 0.0
        self.slack = ROUNDED * network.forbidden
        self.partner: OtherProcess | None = None
        self.report()

    @property
    def reserve(self) -> float:
        """Seconds that one more step and the last evaluation need."""
        return 2 * self.seconds + self.stepped + REST

    @property
    def late(self) -> bool:
        """True if the remaining time is needed to evaluate the answer."""
        return self.clock.over or (self.clock.left is not None and self.clock.left <= self.reserve)

    @property
    def done(self) -> bool:
        """True if the bound equals the answer."""
        return self.incumbent.choices is not None and self.incumbent.bound >= self.incumbent.objective

    def step(self) -> None:
        """A little local search, or a short wait where it is over."""
        if self.late or self.done:
            time.sleep(IDLE)
            return
        start = time.monotonic()
        self.search.step()
        self.stepped = max(time.monotonic() - start, FADED * self.stepped)
        bound = max(self.search.bound, self._hear()) - self.slack
        self.incumbent.raise_bound(math.ceil(bound) if self.whole and math.isfinite(bound) else bound)
        if time.monotonic() >= self.again:
            self.report()

    def _hear(self) -> float:
        """Takes what the partner has found; its best bound."""
        bound = -math.inf
        while self.partner is not None and self.partner.news:
            choices, told = self.partner.news.popleft()
            bound = max(bound, told)
            if choices is not None:
                self.search.offer(choices)
        return bound

    def report(self) -> None:
        """Evaluates the best choices, if they are better than those before."""
        if self.search.best is not None and self.search.cost < self.told:
            start = time.monotonic()
            self.incumbent.evaluate(self.lift(tuple(self.search.best.tolist())))
            self.told = self.search.cost
            self.seconds = time.monotonic() - start
            self.again = time.monotonic() + self.seconds / PART

    def run(self) -> None:
        """Steps until the time is over, with a partner on another core if there is one."""
        if processes() > 1 and (self.clock.left is None or self.clock.left > WORTH):
            self.partner = OtherProcess(PARTNER, (self.search.network, 1))
        try:
            told = self.search.cost
            while not (self.late or self.done):
                self.step()
                if self.partner is not None and self.search.best is not None and self.search.cost < told:
                    self.partner.tell(self.search.best)
                    told = self.search.cost
            self._hear()
            self.report()
        finally:
            if self.partner is not None:
                self.partner.end()
                self.partner = None
