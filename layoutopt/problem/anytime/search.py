"""Local search at any time: prices on overfull points, sweeps under them, and what of a sweep keeps the rows.

1. The start takes everybody's least use (`least_use`).
2. A `Sweep` finds the best choices of most variables at once under the points' prices. Between sweeps the
   prices of overfull points rise and those of others fall (subgradient: Held, Wolfe and Crowder 1974).
3. What differs between the best answer and the sweep's is taken as far as the rows allow (`blended`).
"""

from __future__ import annotations

import math

import numpy as np

from layoutopt.problem.anytime.blend import blended
from layoutopt.problem.anytime.messages import Messages
from layoutopt.problem.anytime.network import Network
from layoutopt.problem.anytime.sweep import MOST, Sweep, firsts
from layoutopt.problem.form import Floats, Ints

CYCLE = 200
"""Steps in which the prices' changes become small, before they are large again."""
CHANGE, LEAST_GAP, MEMORY = 0.3, 0.01, 0.7
"""Of the prices: the largest change, the gap that is at least assumed, what is kept of the last direction."""
REUSED, RESTED = 3, 0.2
"""Sweeps with one order, and how much less likely a variable is to be held that just was."""


class LocalSearch:
    """One network under way.

    Attributes:
      best: feasible choices, as long as there are some; `cost` is theirs.
    """

    def __init__(self, network: Network, seed: int) -> None:
        self.network = network
        self.rng = np.random.default_rng(seed)
        self.best: Ints | None = None
        self.cost = math.inf
        self.prices = np.zeros(len(network.room))
        self.direction = np.zeros(len(network.room))
        self.weights = np.ones(len(network.sizes))
        self.steps = 0
        self.messages = Messages(network)
        self.bound = -math.inf
        self.current = self._least()
        self._offer(self.current)

    def _least(self) -> Ints:
        """Of every variable the choice that uses least over all points; of equals the cheapest."""
        unary = self.network.unary
        uses = self.network.priced(np.ones(len(self.network.room))) - unary
        order = np.empty(len(unary))
        order[np.lexsort((unary, np.round(uses, 6)))] = np.arange(len(unary))
        return firsts(order, self.network)

    def _offer(self, choices: Ints) -> None:
        cost = self.network.cost(choices)
        better = cost < self.cost and cost - self.network.constant < self.network.forbidden
        if better and (self.network.profile(choices) <= self.network.room).all():
            self.best, self.cost = choices, cost

    def step(self) -> None:
        """One sweep, what it gives, and new prices."""
        network = self.network
        if self.steps % REUSED == 0:
            self.sweep = Sweep(network, self.rng, self.weights, MOST)
            self.weights = np.sqrt(self.weights)
            self.weights[self.sweep.held] *= RESTED
        unary = network.priced(self.prices)
        self.messages.turn(unary)
        self.bound = max(self.bound, self.messages.bound - float(self.prices @ network.room))
        likely = firsts(self.messages.total, network)
        options = [self.sweep.best(unary, likely), self.sweep.best(unary, self.current)]
        self.current = min(options, key=lambda x: self._priced(x))
        over = network.profile(self.current) - network.room
        if self.best is None:
            self._offer(self.current)
        else:
            self._offer(blended(network, self.best, self.current, self.prices))
        self._reprice(over)
        self.steps += 1

    def _priced(self, choices: Ints) -> float:
        return self.network.cost(choices) + float(self.prices @ self.network.profile(choices))

    def _reprice(self, over: Floats) -> None:
        cost = self.network.cost(self.current)
        best = self.cost if math.isfinite(self.cost) else cost
        gap = max(best - self.messages.bound + float(self.prices @ self.network.room), LEAST_GAP * abs(best))
        wanted = np.where((self.prices <= 0) & (over < 0), 0.0, over)
        self.direction = MEMORY * self.direction + (1 - MEMORY) * wanted
        length = float(wanted @ wanted)
        if length > 0:
            left = 1 - (self.steps % CYCLE) / CYCLE
            change = CHANGE * left**2 * gap / length
            self.prices = np.maximum(0.0, self.prices + change * self.direction)
