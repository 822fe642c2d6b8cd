r"""The best choices of most variables at once, the others as they are: elimination with a cutset.

Variables are eliminated in an order of small joins (`layoutopt.problem.elimination` has the mathematics);
where every join would have more than `MOST` cells, one of the variables in it is held (cutset conditioning:
Pearl 1986). What is held is drawn by chance, less likely what was held before, so that sweeps differ.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from layoutopt.problem.anytime.network import Network
from layoutopt.problem.form import Floats, Ints

MOST = 1 << 13
"""Cells of one join."""


@dataclass(frozen=True, eq=False)
class Step:
    """One variable's elimination; the axes of its join are `others` and itself."""

    variable: int
    others: tuple[int, ...]
    first: int
    last: int
    tables: tuple[Floats, ...]
    children: tuple[tuple[int, tuple[int, ...]], ...]


class Sweep:
    """An order for some free variables of a network.

    Attributes:
      held: the variables that keep their choices.
    """

    def __init__(self, network: Network, rng: np.random.Generator, weight: Floats, most: int = MOST) -> None:
        self.network = network
        order, self.held = _order(network, rng, weight, math.log(most))
        self._compile(order)
        self.alone = np.ones(len(network.sizes), bool)
        self.alone[network.ends.ravel()] = False

    def _compile(self, order: list[int]) -> None:
        network = self.network
        position = {v: k for k, v in enumerate(order)}
        sizes, offsets = network.sizes.tolist(), network.offsets.tolist()
        scopes: list[set[int]] = [set() for _ in order]
        tables: list[list[tuple[int, Floats]]] = [[] for _ in order]
        border: list[tuple[int, int, bool]] = []
        for number, (a, b) in enumerate(network.ends.tolist()):
            pa, pb = position.get(a), position.get(b)
            if pa is not None and pb is not None:
                k, other = min(pa, pb), b if pa < pb else a
                scopes[k].add(other)
                table = network.tables[number]
                tables[k].append((other, table.T if pa < pb else table))
            elif pa is not None:
                border.append((number, a, True))
            elif pb is not None:
                border.append((number, b, False))
        children: list[list[int]] = [[] for _ in order]
        steps: list[Step] = []
        for k, v in enumerate(order):
            others = tuple(sorted(scopes[k], key=position.__getitem__, reverse=True))
            shape = [sizes[u] for u in others]
            parts = []
            for other, table in tables[k]:
                parts.append(
                    table.reshape(
                        [*(n if u == other else 1 for u, n in zip(others, shape, strict=True)), sizes[v]]
                    )
                )
            below = []
            for child in children[k]:
                mine = set(steps[child].others)
                wide = tuple(n if u in mine else 1 for u, n in zip(others, shape, strict=True))
                below.append((child, (*wide, sizes[v])))
            if others:
                parent = position[others[-1]]
                children[parent].append(k)
                scopes[parent].update(others[:-1])
            steps.append(Step(v, others, offsets[v], offsets[v + 1], tuple(parts), tuple(below)))
        self.steps = steps
        self._border(border)

    def _border(self, border: list[tuple[int, int, bool]]) -> None:
        """Where the cells are that a held variable adds to a free one's choices."""
        network = self.network
        number = np.array([n for n, _, _ in border], np.int64)
        mine = np.array([v for _, v, _ in border], np.int64)
        is_first = np.array([first for _, _, first in border], bool)
        first, second = network.ends[number].T if len(number) else (mine, mine)
        self.outside = np.where(is_first, second, first)
        lengths = network.sizes[mine]
        self.edge = np.repeat(np.arange(len(number)), lengths)
        inside = np.arange(len(self.edge)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.target = network.offsets[mine][self.edge] + inside
        stride = np.where(is_first, network.sizes[second], 1)
        self.base = network.starts[number][self.edge] + inside * stride[self.edge]
        self.jump = np.where(is_first, 1, network.sizes[second])

    def best(self, unary: Floats, choices: Ints) -> Ints:
        """Choices that cost least under (choices,) unary costs, where the held ones are as in `choices`."""
        network = self.network
        cells = self.base + (self.jump * choices[self.outside])[self.edge]
        theta = unary + np.bincount(self.target, network.cells[cells], len(unary))
        joins: list[Floats] = []
        messages: list[Floats] = []
        for step in self.steps:
            total = theta[step.first : step.last]
            for table in step.tables:
                total = total + table
            for child, shape in step.children:
                total = total + messages[child].reshape(shape)
            joins.append(total)
            messages.append(total.min(axis=-1))
        self.least = float(
            sum(float(m) for step, m in zip(self.steps, messages, strict=True) if not step.others)
        )
        least = np.minimum.reduceat(theta, network.offsets[:-1])
        self.least += float(least[self.alone].sum())
        found = np.where(self.alone, firsts(theta, network), choices).tolist()
        for step, total in zip(reversed(self.steps), reversed(joins), strict=True):
            at = tuple([found[u] for u in step.others])
            found[step.variable] = int(total[at].argmin())
        return np.array(found, np.int64)


def firsts(costs: Floats, network: Network) -> Ints:
    """(variables,) the choice of each that has the least of (choices,) costs, the first of equals."""
    least = np.minimum.reduceat(costs, network.offsets[:-1])
    cheapest = np.flatnonzero(costs == np.repeat(least, network.sizes))
    owners = np.searchsorted(network.offsets, cheapest, side="right") - 1
    variables, place = np.unique(owners, return_index=True)
    return cheapest[place] - network.offsets[variables]


def _order(
    network: Network, rng: np.random.Generator, weight: Floats, most: float
) -> tuple[list[int], list[int]]:
    """The free variables in the order of elimination, and the held ones, likelier those of more `weight`."""
    count = len(network.sizes)
    near: list[set[int]] = [set() for _ in range(count)]
    for a, b in network.ends.tolist():
        near[a].add(b)
        near[b].add(a)
    logs = np.log(network.sizes).tolist()
    noise = (0.1 * rng.random(count)).tolist()
    chance = (weight * rng.random(count)).tolist()
    volume = [logs[v] + sum(logs[u] for u in near[v]) for v in range(count)]
    heap = [(volume[v] + noise[v], v) for v in range(count) if near[v]]
    heapq.heapify(heap)
    gone = [False] * count
    order: list[int] = []
    held: list[int] = []

    def refresh(v: int) -> None:
        volume[v] = logs[v] + sum(logs[u] for u in near[v])
        heapq.heappush(heap, (volume[v] + noise[v], v))

    while heap:
        key, v = heapq.heappop(heap)
        if gone[v] or key != volume[v] + noise[v]:
            continue
        around = near[v]
        if volume[v] > most and around:
            # hold the one of this join that is in most others
            c = max((*around, v), key=lambda u: (len(near[u]) + logs[u]) * chance[u])
            gone[c] = True
            held.append(c)
            for u in near[c]:
                near[u].discard(c)
                refresh(u)
            near[c] = set()
            continue
        gone[v] = True
        order.append(v)
        for u in around:
            near[u].discard(v)
            near[u] |= around
            near[u].discard(u)
        for u in around:
            refresh(u)
    return order, held
