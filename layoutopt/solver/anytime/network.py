r"""A problem of unary and pair costs as flat arrays, its rows as one resource over points.

    cost(x)     = constant + sum_i unary_i(x_i) + sum_(i,j) table_ij(x_i, x_j)
    profile(x)  = at every point, the sum of the items that are live there, above what they use at least
    feasible:     profile(x) <= room, at every point

A point is a row, or a time of the interval resource; only those that can be overfull are here. An item is
one variable's use from one point to another. Forbidden costs are `forbidden`, which is more than any
choices cost that are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from layoutopt.solver.form import Choices, CostTable, Floats, Ints, Problem, Sparse
from layoutopt.solver.reductions.state import LARGEST_PAIR

ROUNDED = 1e-12
"""The largest relative error of a sum of numbers that are not whole."""


@dataclass(frozen=True, eq=False)
class Network:
    """See the module.

    Attributes:
      offsets: (variables + 1,) the first number of each variable's choices, counted through.
      unary: (choices,).
      ends: (pairs, 2) the variables of each pair.
      starts: (pairs,) start of each table in `cells`.
      owner, begin, end: (items,) the variable and the points, begin <= point < end.
      used, choice, item: (uses,) amount, choice (numbered consecutively), item.
      room: (points,).
    """

    sizes: Ints
    offsets: Ints
    constant: float
    unary: Floats
    ends: Ints
    cells: Floats
    starts: Ints
    owner: Ints
    begin: Ints
    end: Ints
    used: Floats
    choice: Ints
    item: Ints
    room: Floats
    forbidden: float

    @cached_property
    def tables(self) -> tuple[Floats, ...]:
        """(first's choices, second's choices) per pair, views of `cells`."""
        first, second = self.sizes[self.ends].T
        each = zip(self.starts.tolist(), first.tolist(), second.tolist(), strict=True)
        return tuple(self.cells[start : start + a * b].reshape(a, b) for start, a, b in each)

    def __getstate__(self) -> dict[str, object]:
        """All but the views, which would be copies."""
        return {name: value for name, value in self.__dict__.items() if name != "tables"}

    def cost(self, choices: Ints) -> float:
        """The cost of `choices`, whatever they use."""
        return float(
            self.constant + self.unary[self.offsets[:-1] + choices].sum() + self.pairs(choices).sum()
        )

    def pairs(self, choices: Ints) -> Floats:
        """(pairs,) the cost of each."""
        first, second = self.ends.T
        return self.cells[self.starts + choices[first] * self.sizes[second] + choices[second]]

    def uses(self, choices: Ints) -> Floats:
        """(items,) how much each uses."""
        taken = np.zeros(self.offsets[-1], bool)
        taken[self.offsets[:-1] + choices] = True
        mine = taken[self.choice]
        return np.bincount(self.item[mine], self.used[mine], len(self.owner)).astype(float)

    def over(self, uses: Floats, items: Ints | slice = slice(None)) -> Floats:
        """(points,) the sum of items with these uses."""
        count = len(self.room) + 1
        change = np.bincount(self.begin[items], uses, count) - np.bincount(self.end[items], uses, count)
        return np.cumsum(change)[:-1]

    def profile(self, choices: Ints) -> Floats:
        """(points,) the use of `choices`."""
        return self.over(self.uses(choices))

    def priced(self, prices: Floats) -> Floats:
        """(choices,) the unary costs, and the cost of each choice's uses at (points,) prices."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        per_item = paid[self.end] - paid[self.begin]
        return self.unary + np.bincount(self.choice, self.used * per_item[self.item], len(self.unary))


def network(problem: Problem) -> Network | None:
    """`problem` as a network; None if a term couples more than two variables, an entry more than one, or a
    pair is too large."""
    sizes = np.array(problem.sizes, np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    unary, constant = np.zeros(offsets[-1]), problem.constant
    found: dict[tuple[int, int], Floats] = {}
    for term in problem.terms:
        if len(term.scope) > 2 or math.prod(int(sizes[v]) for v in term.scope) > LARGEST_PAIR:
            return None
        table = _dense(term.table, [problem.sizes[v] for v in term.scope], math.inf)
        if not term.scope:
            constant += float(table)
        elif len(term.scope) == 1:
            unary[offsets[term.scope[0]] : offsets[term.scope[0] + 1]] += table
        else:
            a, b = term.scope
            key, table = ((a, b), table) if a < b else ((b, a), table.T)
            found[key] = found[key] + table if key in found else table
    if any(len(entry.scope) > 1 for row in problem.rows for entry in row.entries):
        return None
    cells = np.concatenate([np.zeros(0), *(table.ravel() for table in found.values())])
    finite = sum(
        float(np.abs(t[np.isfinite(t)]).max(initial=0.0))
        for t in (*np.split(unary, offsets[1:-1]), *found.values())
    )
    forbidden = 2.0 * finite + 1.0
    unary[np.isinf(unary)] = forbidden
    cells[np.isinf(cells)] = forbidden
    shapes = [table.shape for table in found.values()]
    starts = np.concatenate([[0], np.cumsum([a * b for a, b in shapes])]).astype(np.int64)[:-1]
    ends = np.array(list(found), np.int64).reshape(-1, 2)
    return Network(
        sizes, offsets, constant, unary, ends, cells, starts, *_resource(problem, offsets), forbidden
    )


def least_use(problem: Problem) -> Choices:
    """The choice of every variable with the least use, all uses counted equally; among equal ones the
    cheapest."""
    uses, costs = [np.zeros(size) for size in problem.sizes], [np.zeros(size) for size in problem.sizes]
    for usage in problem.intervals.usages if problem.intervals else ():
        uses[usage.variable] += usage.table
    for row in problem.rows:
        for entry in row.entries:
            if len(entry.scope) == 1:
                uses[entry.scope[0]] += _dense(entry.table, [problem.sizes[entry.scope[0]]], 0.0)
    for term in problem.terms:
        if len(term.scope) == 1:
            costs[term.scope[0]] += _dense(term.table, [problem.sizes[term.scope[0]]], math.inf)
    for use, cost in zip(uses, costs, strict=True):
        use[np.isinf(cost)] = np.inf
    return tuple(int(np.lexsort((cost, use))[0]) for use, cost in zip(uses, costs, strict=True))


def _dense(table: CostTable, sizes: Sequence[int], missing: float) -> Floats:
    if not isinstance(table, Sparse):
        return table
    full = np.full(tuple(sizes), missing)
    full[tuple(table.assignments.T)] = table.values
    return full


def _resource(problem: Problem, offsets: Ints) -> tuple[Ints, Ints, Ints, Floats, Ints, Ints, Floats]:
    """(owner, begin, end, used, choice, item, room) of the rows and the interval resource."""
    points, limits = np.zeros(0, np.int64), np.zeros(0)
    items: dict[tuple[int, int, int], Floats] = {}

    def add(variable: int, begin: int, end: int, table: Floats) -> None:
        key = variable, begin, end
        items[key] = items[key] + table if key in items else table

    if problem.intervals and math.isfinite(problem.intervals.limit):
        points = np.array(problem.intervals.points, np.int64)
        limits = np.full(len(points), problem.intervals.limit)
        usages = problem.intervals.usages
        begins = np.searchsorted(points, [usage.start for usage in usages]).tolist()
        ends = np.searchsorted(points, [usage.end for usage in usages]).tolist()
        for usage, begin, end in zip(usages, begins, ends, strict=True):
            if begin < end:
                add(usage.variable, begin, end, usage.table)
    for row in problem.rows:
        if math.isfinite(row.limit):
            here = len(limits)
            limits = np.append(limits, row.limit)
            for entry in row.entries:
                if entry.scope:
                    table = _dense(entry.table, [problem.sizes[entry.scope[0]]], 0.0)
                    add(entry.scope[0], here, here + 1, table)
                else:
                    limits[here] -= entry.use(())
    return _live(items, limits, offsets)


def _live(
    items: dict[tuple[int, int, int], Floats], limits: Floats, offsets: Ints
) -> tuple[Ints, Ints, Ints, Floats, Ints, Ints, Floats]:
    """Only points that can be overfull, and items that differ there."""
    keys = np.array(list(items), np.int64).reshape(-1, 3)
    count = len(limits) + 1

    def total(values: list[float]) -> Floats:
        change = np.bincount(keys[:, 1], values, count) - np.bincount(keys[:, 2], values, count)
        return np.cumsum(change)[:-1]

    tables = list(items.values())
    least = total([float(table.min()) for table in tables])
    most = total([float(table.max()) for table in tables])
    broken = total([float((table != np.floor(table)).any()) for table in tables]) > 0
    scale = np.abs(limits) + total([float(np.abs(table).max()) for table in tables])
    room = limits - least - np.where(broken, ROUNDED * scale, 0.0)
    binding = most - least > room
    place = np.concatenate([[0], np.cumsum(binding)])
    kept: dict[tuple[int, int, int], Floats] = {}
    for (variable, begin, end), table in items.items():
        first, last = int(place[begin]), int(place[end])
        above = table - table.min()
        if first < last and above.any():
            key = variable, first, last
            kept[key] = kept[key] + above if key in kept else above
    owner, starts, ends = np.array(list(kept), np.int64).reshape(-1, 3).T
    used = np.concatenate([np.zeros(0), *kept.values()])
    lengths = np.array([len(table) for table in kept.values()], np.int64)
    item = np.repeat(np.arange(len(owner)), lengths)
    inside = np.arange(len(used)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    choice = offsets[owner][item] + inside
    some = used != 0
    return owner, starts, ends, used[some], choice[some], item[some], room[binding]
