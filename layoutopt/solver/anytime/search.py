r"""Local search at any time: prices on overfull points, sweeps under them, and the parts of a sweep that
satisfy the rows.

1. The start takes the least use of every variable (`least_use`).
2. Prices rise where the points are overfull and fall elsewhere, each by a factor

       p_t <- p_t exp(rate (use_t - room_t) / room_t)

   (multiplicative weights: Plotkin, Shmoys and Tardos 1995), where use_t is averaged over the last choices.
   At first these are the likely choices by the messages, which are cheap to compute (`ASCENT`).
3. Then an `EliminationOrder` finds the best choices of most variables at once under prices that continue
   to change.
4. Choices that are cheaper than the best answer but overfull are swept again under prices that rise only
   where they are overfull, until they fit (`_repair`).
5. The differences between the best answer and the sweep's are taken as far as the rows allow (`blended`).
6. If nothing better was found for long, all prices change at random (`_kick`).
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from layoutopt.solver.anytime.blend import blended
from layoutopt.solver.anytime.messages import Messages
from layoutopt.solver.anytime.network import Network
from layoutopt.solver.anytime.sweep import EliminationOrder, firsts
from layoutopt.solver.form import Bools, Floats, Ints

ASCENT = 80
"""Steps in which only messages and prices change."""
RATES, AT_MOST = (0.3, 0.1), 0.7
"""How fast prices change at first and in the end, and the logarithm of the most that one does in a step."""
MEMORY = 0.8, 0.5
"""Decay of the memory of earlier choices' uses: of likely ones, and of those of sweeps."""
SMALL = 1e-3
"""The first prices, times all room, as a share of the average choices' cost."""
FORGOTTEN = 1e-12
"""Part of the highest price, in parts of the room, that every price keeps, so that it can rise again."""
KEPT, RENEWED, RESTED = 6, 4, 0.2
"""Orders that take turns, steps until one is replaced, and how much less likely a variable is to be held that
just was."""
LIKELY = 5
"""Number of steps after which a sweep also starts at the likely choices."""
REPAIRS, STEEP, BUMP, SEEN = 16, 3.0, (0.1, 1.0), 1e-3
"""Sweeps of a repair; how much prices rise in it, as a logarithm, per relative excess, at least and at most,
times the number of the sweep; the price where there was none, in parts of the highest."""
AIMED, FREED = 4, 0.01
"""Number of sweeps of a repair until one aims at overfull rows, and the factor by which holding these becomes
less likely."""
STALE, KICK = 20, 1.0
"""Sweeps without a better answer until prices change by chance, each and all of them, and by how much: the
standard deviation of the logarithm."""
WORK = 1 << 27, 1 << 16, 1 << 18
"""Cells of one sweep's joins, as a guess; the fewest and the most of one join."""


class LocalSearch:
    """The search on one network.

    Attributes:
      best: feasible choices, as long as there are some; `cost` is theirs.
    """

    def __init__(self, network: Network, seed: int) -> None:
        self.network = network
        self.rng = np.random.default_rng(seed)
        self.best: Ints | None = None
        self.cost = math.inf
        self.scale = np.where(network.room > 0, network.room, 1.0)
        self.prices = SMALL * self._average() / max(len(network.room), 1) / self.scale
        self.used: Floats | None = None
        self.weights = np.ones(len(network.sizes))
        self.sweeps: deque[EliminationOrder] = deque(maxlen=KEPT)
        work, least, most = WORK
        self.most = min(max(work // max(len(network.ends), 1), least), most)
        self.steps = 0
        self.messages = Messages(network)
        self.bound = -math.inf
        self.stale = 0
        self.attempt: tuple[Ints, Floats, int] | None = None
        self.current = self._least()
        self.offer(self.current)

    def _average(self) -> float:
        """What all choices cost on average, those that are allowed."""
        network = self.network
        unary = np.where(network.unary < network.forbidden, np.abs(network.unary), 0.0)
        cells = np.where(network.cells < network.forbidden, np.abs(network.cells), 0.0)
        lengths = np.diff(np.append(network.starts, len(cells)))
        own = unary / np.repeat(network.sizes, network.sizes)
        return float(own.sum() + (cells / np.repeat(lengths, lengths)).sum())

    def _least(self) -> Ints:
        """Of every variable the choice that uses least over all points; of equals the cheapest."""
        unary = self.network.unary
        uses = self.network.priced(np.ones(len(self.network.room))) - unary
        order = np.empty(len(unary))
        order[np.lexsort((unary, np.round(uses, 6)))] = np.arange(len(unary))
        return firsts(order, self.network)

    def offer(self, choices: Ints) -> bool:
        """Keeps `choices` if they are feasible and better; whether they are."""
        cost = self.network.cost(choices)
        better = cost < self.cost and cost - self.network.constant < self.network.forbidden
        if better and self._fits(choices):
            self.best, self.cost, self.stale = choices, cost, 0
            return True
        return False

    def step(self) -> None:
        """New messages, mostly a sweep and its answer, and new prices; or one sweep of a repair."""
        if self.attempt is not None:
            self._repair(*self.attempt)
            return
        network = self.network
        if self.stale >= STALE and self.best is not None:
            self._kick(self.best)
        unary = network.priced(self.prices)
        self.messages.turn(unary)
        self.bound = max(self.bound, self.messages.bound - float(self.prices @ network.room))
        if self.steps < ASCENT:
            likely = firsts(self.messages.total, network)
            self.offer(likely)
            self._reprice(likely, RATES[0] + (RATES[1] - RATES[0]) * self.steps / ASCENT, MEMORY[0])
        else:
            self._sweep(unary)
            self._reprice(self.current, RATES[1], MEMORY[1])
        self.steps += 1

    def _sweep(self, unary: Floats) -> None:
        """The best choices that a sweep finds, and what of them can be had."""
        network, now = self.network, self.steps - ASCENT
        self.stale += 1
        if now % RENEWED == 0 or len(self.sweeps) < KEPT:
            self._add(self.weights)
        sweep = self._drawn()
        starts = [self.current]
        if now % LIKELY == 0:
            starts.append(firsts(self.messages.total, network))
        self.current = min((sweep.best(unary, start) for start in starts), key=self._priced)
        if self.offer(self.current):
            return
        cheaper = network.cost(self.current) < self.cost
        if self.best is not None:
            self.offer(blended(network, self.best, self.current, self.prices))
        if cheaper and not self._fits(self.current):
            self.attempt = self.current, self.prices, 1

    def _kick(self, best: Ints) -> None:
        """Other prices, and the best answer as what is current: what was tried led to nothing better."""
        each = self.rng.standard_normal(len(self.prices))
        self.prices = self.prices * np.exp(KICK * (each + self.rng.standard_normal()))
        self.current, self.stale = best, 0

    def _repair(self, choices: Ints, prices: Floats, number: int) -> None:
        """One sweep of the attempt to make overfull choices fit."""
        network = self.network
        over = (network.profile(choices) - network.room) / self.scale
        least = SEEN * (prices * self.scale).max(initial=0.0) / self.scale
        higher = np.maximum(prices, least) * np.exp(np.clip(STEEP * over, *BUMP) * number)
        prices = np.where(over > 0, higher, prices)
        if number % AIMED == 0:
            self._aim(choices, over > 0)
        sweep = self.sweeps[-1] if number % AIMED == 0 else self._drawn()
        choices = sweep.best(network.priced(prices), choices)
        found = self.offer(choices)
        if found or number == REPAIRS or network.cost(choices) >= self.cost or self._fits(choices):
            self.attempt = None
            self.current = min(self.current, choices, key=self._priced)
            if not found and self.best is not None:
                self.offer(blended(network, self.best, choices, prices))
        else:
            self.attempt = choices, prices, number + 1

    def _aim(self, choices: Ints, points: Bools) -> None:
        """A new sweep, in which what makes these points overfull is free if it can be."""
        network = self.network
        count = np.concatenate([[0], np.cumsum(points)])
        there = (count[network.end] > count[network.begin]) & (network.uses(choices) > 0)
        weights = self.weights.copy()
        weights[network.owner[there]] *= FREED
        self._add(weights)

    def _add(self, weights: Floats) -> None:
        """One more sweep in the place of the oldest."""
        sweep = EliminationOrder(self.network, self.rng, weights, self.most)
        self.weights = np.sqrt(self.weights)
        self.weights[sweep.held] *= RESTED
        self.sweeps.append(sweep)

    def _fits(self, choices: Ints) -> bool:
        return bool((self.network.profile(choices) <= self.network.room).all())

    def _drawn(self) -> EliminationOrder:
        return self.sweeps[int(self.rng.integers(len(self.sweeps)))]

    def _priced(self, choices: Ints) -> float:
        return self.network.cost(choices) + float(self.prices @ self.network.profile(choices))

    def _reprice(self, choices: Ints, rate: float, memory: float) -> None:
        used = self.network.profile(choices)
        self.used = used if self.used is None else memory * self.used + (1 - memory) * used
        over = rate * (self.used - self.network.room) / self.scale
        self.prices = self.prices * np.exp(np.clip(over, -AT_MOST, AT_MOST))
        paid = self.prices * self.scale
        self.prices = np.maximum(self.prices, FORGOTTEN * paid.max(initial=0.0) / self.scale)
