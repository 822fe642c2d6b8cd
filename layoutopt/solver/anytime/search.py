"""Local search at any time: prices on overfull points, sweeps under them, and the parts of a sweep that
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

A bound on a network's cost and its choices' likely costs: sequential tree-reweighted message passing.

A message M_ij moves cost from a pair's table to the choices of j. With variables in a fixed order, each sends
in turn to those after it, and then, backwards, to those before it,

    M_ij(x_j) = min over x_i of  g_i (unary_i + sum_k M_ki)(x_i) - M_ji(x_i) + table_ij(x_i, x_j),

where g_i is 1 / the larger number of neighbours on one side. The constants that are removed on the way back
add up to a lower bound, which never falls (Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy
Minimization", PAMI 2006). Variables of one colour have no pair, so they send at once.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.anytime.blend import blended
from layoutopt.solver.anytime.network import Network
from layoutopt.solver.anytime.sweep import EliminationOrder, firsts
from layoutopt.solver.form import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class MessageBatch:
    """The messages that the variables of one colour send in one direction.

    Attributes:
      members: (choices,) the senders' choices, counted through; `begins` where each sender's begin.
      source: (inputs,) choices of the sender of each message; `share` is g of it, `back` is the position of
        the opposite message.
      cells, at: the tables, receiver's choice first, and the input of each cell.
      rows: start of each receiver's choice in `cells`.
      heads, lengths: start and length of each message in `rows`.
      out, target: destination of each number: the message, and the receiver's choice.
    """

    members: Ints
    begins: Ints
    sizes: Ints
    source: Ints
    share: Floats
    back: Ints
    cells: Floats
    at: Ints
    rows: Ints
    heads: Ints
    lengths: Ints
    out: Ints
    target: Ints


class Messages:
    """The messages of one network; `bound` is that of the last `turn`.

    Attributes:
      total: (choices,) the unary costs with all messages.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        first, second = network.ends.T
        sizes = network.sizes
        # the message to the first of pair p begins at to_first[p], the one to the second at to_second[p]
        lengths = np.stack([sizes[first], sizes[second]], axis=1).ravel()
        begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.to_first, self.to_second = begins[:-1:2], begins[1::2]
        self.values = np.zeros(begins[-1])
        self.total = np.zeros(len(network.unary))
        takers = np.stack([first, second], axis=1).ravel()
        self.targets = _ranges(network.offsets[takers], lengths)
        colour = _colours(network)
        later = np.bincount(np.where(colour[first] < colour[second], first, second), minlength=len(sizes))
        sooner = np.bincount(np.where(colour[first] < colour[second], second, first), minlength=len(sizes))
        share = 1.0 / np.maximum(1, np.maximum(later, sooner))
        count = int(colour.max(initial=0)) + 1
        self.forth = [self._batch(colour, share, c, 1) for c in range(count)]
        self.back = [self._batch(colour, share, c, -1) for c in range(count - 1, -1, -1)]
        self.bound = -np.inf

    def _batch(self, colour: Ints, share: Floats, now: int, way: int) -> MessageBatch:
        network, sizes, offsets = self.network, self.network.sizes, self.network.offsets
        first, second = network.ends.T
        mine = np.flatnonzero(colour == now)
        members = _ranges(offsets[mine], sizes[mine])
        begins = np.cumsum(sizes[mine]) - sizes[mine]
        ahead = (colour[second] - colour[first]) * way > 0
        sends_first = np.flatnonzero((colour[first] == now) & ahead)
        sends_second = np.flatnonzero((colour[second] == now) & ~ahead)
        pairs = np.concatenate([sends_first, sends_second])
        straight = np.arange(len(pairs)) < len(sends_first)
        sender = np.where(straight, first[pairs], second[pairs])
        taker = np.where(straight, second[pairs], first[pairs])
        ns, nt = sizes[sender], sizes[taker]
        source = _ranges(offsets[sender], ns)
        back = _ranges(np.where(straight, self.to_first[pairs], self.to_second[pairs]), ns)
        out = _ranges(np.where(straight, self.to_second[pairs], self.to_first[pairs]), nt)
        target = _ranges(offsets[taker], nt)
        blocks = [
            (network.tables[p].T if is_first else network.tables[p]).ravel()
            for p, is_first in zip(pairs.tolist(), straight.tolist(), strict=True)
        ]
        cells = np.concatenate([np.zeros(0), *blocks])
        inputs = np.cumsum(ns) - ns
        at = _ranges(np.repeat(inputs, nt), np.repeat(ns, nt))
        widths = np.repeat(ns, nt)
        rows = np.cumsum(widths) - widths
        heads = np.cumsum(nt) - nt
        shares = np.repeat(share[sender], ns)
        layout = (cells, at, rows, heads, nt, out, target)
        return MessageBatch(members, begins, sizes[mine], source, shares, back, *layout)

    def turn(self, unary: Floats) -> None:
        """Forth and back once, under (choices,) unary costs."""
        self.total = unary + np.bincount(self.targets, self.values, len(unary))
        for batch in self.forth:
            self._send(batch)
        self.bound = self.network.constant + sum(self._send(batch) for batch in self.back)

    def _send(self, batch: MessageBatch) -> float:
        own = self.total[batch.members]
        least = np.minimum.reduceat(own, batch.begins)
        bound = float(least.sum())
        if not len(batch.rows):
            return bound
        normal = self.total
        normal[batch.members] = own - np.repeat(least, batch.sizes)
        given = batch.share * normal[batch.source] - self.values[batch.back]
        normal[batch.members] = own
        found = np.minimum.reduceat(given[batch.at] + batch.cells, batch.rows)
        low = np.minimum.reduceat(found, batch.heads)
        found -= np.repeat(low, batch.lengths)
        self.total += np.bincount(batch.target, found - self.values[batch.out], len(self.total))
        self.values[batch.out] = found
        return bound + float(low.sum())


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """starts[0], starts[0] + 1, ... lengths[0] of them, then those of the next."""
    inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + inside


def _colours(network: Network) -> Ints:
    """(variables,) colours from 0 that differ along each pair: each variable takes the first that is free,
    those with most neighbours first."""
    near: list[list[int]] = [[] for _ in network.sizes]
    for a, b in network.ends.tolist():
        near[a].append(b)
        near[b].append(a)
    colour = [-1] * len(near)
    for v in sorted(range(len(near)), key=lambda v: (-len(near[v]), v)):
        taken = {colour[u] for u in near[v]}
        colour[v] = next(c for c in range(len(near)) if c not in taken)
    return np.array(colour, np.int64)


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
