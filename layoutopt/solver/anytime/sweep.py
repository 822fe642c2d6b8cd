r"""The best choices of most variables at once, with the others fixed: elimination with a cutset.

Variables are eliminated in an order of small joins (`layoutopt.solver.elimination` has the mathematics);
where every join would have more than `most` cells, one of the variables in it is held (cutset conditioning:
Pearl 1986). The held variables are drawn at random, with less weight for those held before, so that sweeps
differ.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.anytime.network import Network
from layoutopt.solver.form import Floats, Ints


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """One variable's elimination; the axes of its join are `others` and itself.

    Attributes:
      tables: per pair, (axis, pair, whether the variable is its second).
      children: per message, its shape in the join, and the step that it comes from.
    """

    number: int
    variable: int
    others: tuple[int, ...]
    shape: tuple[int, ...]
    tables: list[tuple[int, int, bool]]
    children: list[tuple[tuple[int, ...], int]]

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for steps that can be done as one, once their children are done."""
        return self.shape, tuple(axis for axis, _, _ in self.tables), tuple(wide for wide, _ in self.children)


@dataclass(frozen=True, eq=False)
class StepBatch:
    """Steps of one kind, done as one: every array has the steps first.

    Attributes:
      theta: (steps, choices) the variables' choices, counted through.
      tables: per pair of a join, (steps, 1 or the other's size for each other, choices).
      messages: per message of a join, where its numbers are, and the shape that they take.
      begin, end: where these steps' own messages are.
    """

    variables: Ints
    others: Ints
    shape: tuple[int, ...]
    theta: Ints
    tables: tuple[Floats, ...]
    messages: tuple[tuple[Ints, tuple[int, ...]], ...]
    begin: int
    end: int

    def join(self, theta: Floats, messages: Floats) -> Floats:
        """(steps, *shape) cost of all assignments."""
        total = theta[self.theta].reshape(-1, *(1 for _ in self.shape[:-1]), self.shape[-1])
        for table in self.tables:
            total = total + table
        for numbers, shape in self.messages:
            total = total + messages[numbers].reshape(-1, *shape)
        return total


class EliminationOrder:
    """An order for some free variables of a network.

    Attributes:
      held: the variables that keep their choices.
    """

    def __init__(self, network: Network, rng: np.random.Generator, weight: Floats, most: int) -> None:
        self.network = network
        order, self.held = _order(network, rng, weight, math.log(most))
        self._compile(order)
        self.alone = np.ones(len(network.sizes), bool)
        self.alone[network.ends.ravel()] = False

    def _compile(self, order: list[int]) -> None:
        position = {v: k for k, v in enumerate(order)}
        sizes = self.network.sizes.tolist()
        scopes: list[set[int]] = [set() for _ in order]
        pairs: list[list[tuple[int, int, bool]]] = [[] for _ in order]
        border: list[tuple[int, int, bool]] = []
        for number, (a, b) in enumerate(self.network.ends.tolist()):
            pa, pb = position.get(a), position.get(b)
            if pa is not None and pb is not None:
                k, other = min(pa, pb), b if pa < pb else a
                scopes[k].add(other)
                pairs[k].append((other, number, pb < pa))
            elif pa is not None:
                border.append((number, a, True))
            elif pb is not None:
                border.append((number, b, False))
        children: list[list[int]] = [[] for _ in order]
        level = [0] * len(order)
        steps, alike = list[EliminationStep](), dict[tuple[int, tuple[object, ...]], list[EliminationStep]]()
        for k, v in enumerate(order):
            others = tuple(sorted(scopes[k], key=position.__getitem__, reverse=True))
            tables = sorted((others.index(u), number, second) for u, number, second in pairs[k])
            below = []
            for child in children[k]:
                mine = set(steps[child].others)
                below.append((tuple(sizes[u] if u in mine else 1 for u in (*others, v)), child))
            shape = (*(sizes[u] for u in others), sizes[v])
            steps.append(EliminationStep(k, v, others, shape, tables, sorted(below)))
            alike.setdefault((level[k], steps[k].kind), []).append(steps[k])
            if others:
                parent = position[others[-1]]
                children[parent].append(k)
                scopes[parent].update(others[:-1])
                level[parent] = max(level[parent], level[k] + 1)
        self._batch(alike)
        self._border(border)

    def _batch(self, alike: dict[tuple[int, tuple[object, ...]], list[EliminationStep]]) -> None:
        begins, self.batches = dict[int, int](), list[StepBatch]()
        self.numbers = 0
        for level_and_kind in sorted(alike, key=lambda found: found[0]):
            steps = alike[level_and_kind]
            self.batches.append(self._one(steps, begins))
            length = math.prod(steps[0].shape[:-1])
            for step in steps:
                begins[step.number] = self.numbers
                self.numbers += length

    def _one(self, steps: list[EliminationStep], begins: dict[int, int]) -> StepBatch:
        network, first = self.network, steps[0]
        size = first.shape[-1]
        variables = np.array([step.variable for step in steps], np.int64)
        tables = []
        for place, (axis, _, _) in enumerate(first.tables):
            each = [step.tables[place] for step in steps]
            stacked = np.stack(
                [network.tables[n] if second else network.tables[n].T for _, n, second in each]
            )
            wide = [1] * len(first.others)
            wide[axis] = first.shape[axis]
            tables.append(stacked.reshape(-1, *wide, size))
        messages = []
        for place, (wide_shape, _) in enumerate(first.children):
            starts = np.array([begins[step.children[place][1]] for step in steps], np.int64)
            messages.append((starts[:, None] + np.arange(math.prod(wide_shape)), wide_shape))
        return StepBatch(
            variables,
            np.array([step.others for step in steps], np.int64).reshape(len(steps), -1),
            first.shape,
            network.offsets[variables][:, None] + np.arange(size),
            tuple(tables),
            tuple(messages),
            self.numbers,
            self.numbers + len(steps) * math.prod(first.shape[:-1]),
        )

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
        """Choices with the least cost under (choices,) unary costs, with held variables as in `choices`."""
        network = self.network
        cells = self.base + (self.jump * choices[self.outside])[self.edge]
        theta = unary + np.bincount(self.target, network.cells[cells], len(unary))
        messages = np.empty(self.numbers)
        joins: list[Floats] = []
        for batch in self.batches:
            joins.append(batch.join(theta, messages))
            messages[batch.begin : batch.end] = joins[-1].min(axis=-1).ravel()
        found = np.where(self.alone, firsts(theta, network), choices)
        for batch, total in zip(reversed(self.batches), reversed(joins), strict=True):
            rows = np.arange(len(batch.variables))
            for axis, size in enumerate(batch.shape[:-1]):
                rows = rows * size + found[batch.others[:, axis]]
            found[batch.variables] = total.reshape(-1, batch.shape[-1])[rows].argmin(axis=-1)
        return found


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
    order, held = list[int](), list[int]()

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
