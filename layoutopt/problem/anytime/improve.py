"""Local search beside other work: its answers and bounds go to the incumbent of the whole problem."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from layoutopt.clock import Clock
from layoutopt.problem.anytime.network import ROUNDED, Network
from layoutopt.problem.anytime.search import LocalSearch
from layoutopt.problem.form import Choices
from layoutopt.problem.incumbent import Incumbent
from layoutopt.problem.lagrangian import whole

PART = 0.1
"""Of the time: what evaluating answers may take."""
REST = 0.1
"""Seconds that are left over."""
IDLE = 0.05
"""Seconds to wait where there is nothing to do."""


class Improver:
    """Steps of local search on a network; `lift` makes its choices those of the incumbent's problem."""

    def __init__(
        self,
        incumbent: Incumbent,
        network: Network,
        lift: Callable[[Choices], Choices],
        clock: Clock,
        seed: int,
    ) -> None:
        self.incumbent, self.lift, self.clock = incumbent, lift, clock
        self.whole = whole(incumbent.problem)
        self.search = LocalSearch(network, seed)
        self.told, self.again, self.seconds = math.inf, 0.0, 0.0
        self.slack = ROUNDED * network.forbidden
        self.report()

    @property
    def reserve(self) -> float:
        """Seconds that the last evaluation needs."""
        return 2 * self.seconds + REST

    @property
    def late(self) -> bool:
        """What time is left is needed to evaluate the answer."""
        return self.clock.over or (self.clock.left is not None and self.clock.left <= self.reserve)

    @property
    def done(self) -> bool:
        """The bound meets the answer."""
        return self.incumbent.choices is not None and self.incumbent.bound >= self.incumbent.objective

    def step(self) -> None:
        """A little local search, or a short wait where it is over."""
        if self.late or self.done:
            time.sleep(IDLE)
            return
        self.search.step()
        bound = self.search.bound - self.slack
        self.incumbent.raise_bound(math.ceil(bound) if self.whole and math.isfinite(bound) else bound)
        if time.monotonic() >= self.again:
            self.report()

    def report(self) -> None:
        """Evaluates the best choices, if they are better than those before."""
        if self.search.best is not None and self.search.cost < self.told:
            start = time.monotonic()
            self.incumbent.evaluate(self.lift(tuple(self.search.best.tolist())))
            self.told = self.search.cost
            self.seconds = time.monotonic() - start
            self.again = time.monotonic() + self.seconds / PART

    def run(self) -> None:
        """Steps until the time is over."""
        while not (self.late or self.done):
            self.step()
        self.report()
