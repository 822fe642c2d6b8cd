r"""Problems with rows, by elimination: rows get prices, and parts of no better answer are removed.

For prices p >= 0 of the rows, no feasible choices cost less than they do under

    L_p(x) = cost(x) + sum_r p_r (use_r(x) - limit_r)                    (Everett 1963, Geoffrion 1974)

whose least value, and the least with any given part of the choices (`messages`), elimination finds: entries
of rows lie within the scopes of tables, so they are further tables of the same kind. So

1. prices are raised until the bound min L_p stops rising, one row after the other (`_along`). Choices met on
   the way that satisfy all rows are answers (`Incumbent`).
2. What has no completion with L_p below the best answer, or within the limit of one row, leaves the tree.
3. What is left is listed, if it is not too much, under all these limits at once (`listing`); otherwise it is
   a smaller problem for a solver (`rest`).

Where the joins of the tables are too large nothing is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from layoutopt.runtime.clock import Clock
from layoutopt.solver import enumeration as listing
from layoutopt.solver.elimination import chosen, constant, positions, tabled
from layoutopt.solver.form import Bools, Floats, Ints, Problem
from layoutopt.solver.incumbent import ALIKE, Incumbent
from layoutopt.solver.join_tree import Costs, JoinTree, TablesByScope, grow, spread
from layoutopt.solver.residual import ResidualProblem, ResourceUsage, rest, uses

VARIABLES = 256
"""Problems of more variables are not tried: their joins are too large, which takes time to see."""
JOINED, TOGETHER, NUMBERS = 1 << 19, 1 << 20, 1 << 24
"""The most assignments of one join and of all, and numbers that are held at once."""
PORTIONS, GROWTH = (1 << 14, 1 << 17), 8
"""Beginnings that are listed at first and at most, and the growth factor after a round without progress."""
ROUNDS, STEPS = 16, 24
"""Number of rows whose price is raised before tables shrink, and number of prices tried for one row."""
SHRUNK = 0.7
"""Share of the assignments up to which prices are raised again."""
STRETCHES = (1.5, 3.0, 10.0)
"""Factors by which all prices are raised if no feasible choices were found."""
WORTH = 1e-3
"""Share of the gap below which a price is not improved further."""
ROUNDED = 1e-12
"""Relative difference that the order of a sum can make: up to it a row counts as kept."""


def whole(problem: Problem) -> bool:
    """Every cost is a whole number, so that the optimum is one too."""
    if problem.constant != math.floor(problem.constant):
        return False
    return all(bool((term.values == np.floor(term.values)).all()) for term in problem.terms)


@dataclass(frozen=True, eq=False)
class Visit:
    """The least of L_p for some prices, and the choices that have it.

    Attributes:
      over: (limits,) use above each limit.
    """

    prices: Floats
    bound: float
    costs: Costs
    cost: float
    over: Floats

    def without(self, row: int) -> float:
        """L_p of the choices for a price 0 of one row."""
        others = self.prices.copy()
        others[row] = 0.0
        return self.cost + float(others @ self.over)


class LagrangianSearch:
    """The search on one problem.

    Attributes:
      seen: (limits,) which rows were overfull.
      listed: beginnings of choices, so far.
      every: choices do not replace others.
      done: nothing better than the incumbent is left.
    """

    def __init__(
        self, incumbent: Incumbent, clock: Clock, tree: JoinTree, tables: TablesByScope, used: ResourceUsage
    ) -> None:
        self.incumbent, self.clock = incumbent, clock
        self.problem, self.whole = incumbent.problem, whole(incumbent.problem)
        self.tree, self.uses = tree, used
        self.values = [values for _, values in tables.values()]
        self.constant = constant(self.problem)
        self.scales = used.scales
        self.slack = ROUNDED * self.scales
        self.seen = np.zeros(len(used.limits), bool)
        self.listed, self.every = 0, False
        self.done = False

    @property
    def cut(self) -> float:
        """The cost from which on choices are no better than the incumbent, or over the limit."""
        best, limit = self.incumbent.objective, self.incumbent.limit
        less = 0.5 if self.whole else ALIKE * abs(best)
        better = best - less if math.isfinite(best) else math.inf
        return min(better, limit + ALIKE * abs(limit) if math.isfinite(limit) else math.inf)

    def stops(self) -> bool:
        """There is nothing, or no time, left."""
        return self.done or self.clock.over

    def run(self) -> None:
        """Raises prices, shrinks tables and lists remaining assignments in turn."""
        best, portion = self._ascend(np.zeros(len(self.uses.limits))), PORTIONS[0]
        if math.isinf(self.cut):
            for stretch in STRETCHES:
                self._visit(stretch * best.prices)
        while not self.stops():
            before = self.tree.rows
            self._shrink(best)
            if self.stops():
                break
            if self.tree.rows > SHRUNK * before:
                if portion > PORTIONS[-1] or self.listed > PORTIONS[-1]:
                    break
                if not self._list(best, portion):
                    portion *= GROWTH
            if not self.stops():
                best = self._ascend(best.prices)
        if self.done:
            # Nothing is better by more than rounding.
            least = self.incumbent.objective
            self._prove(least if math.isfinite(least) else self.cut)

    def _prove(self, bound: float) -> None:
        """Notes that no feasible choices cost less."""
        if math.isfinite(bound):
            self.incumbent.raise_bound(bound)

    # -- prices ----------------------------------------------------------------------------------------------

    def _visit(self, prices: Floats) -> Visit:
        values = list(self.values)
        for number, table in self.uses.tables.items():
            values[number] = values[number] + prices @ table
        costs = spread(self.tree, values)
        bound = self.constant + costs.least - float(prices @ self.uses.limits)
        visit = Visit(prices, bound, costs, *self._met(costs))
        self._prove(min(bound, self.cut))
        return visit

    def _met(self, costs: Costs) -> tuple[float, Floats]:
        """What the best choices of some costs really cost, and what they use above the limits."""
        if math.isinf(costs.least):
            self.done = True
            return math.inf, np.full(len(self.uses.limits), math.inf)
        rows = costs.best()
        at = positions(self.tree, rows)
        cost = self.constant + math.fsum(values[k] for values, k in zip(self.values, at, strict=True))
        over = -self.uses.limits
        for number, table in self.uses.tables.items():
            over = over + table[:, at[number]]
        if (over <= self.slack).all() and cost <= self.cut:
            self.incumbent.evaluate(chosen(self.tree, rows, len(self.problem.sizes)))
        return cost, over

    def _ascend(self, prices: Floats) -> Visit:
        """Raises the price of the row that is most overfull, then of the one that is so now; in the end of
        others that were once."""
        best = other = self._visit(prices)
        tried: set[int] = set()
        for _ in range(ROUNDS):
            wanted = self.seen | (other.over > self.slack)
            wanted[list(tried)] = False
            if self.stops() or not wanted.any():
                break
            row = int(np.argmax(np.where(wanted, other.over / self.scales, -np.inf)))
            self.seen[row] = True
            known = best.bound
            best, other = self._along(row, best)
            tried = {row} if best.bound > known else {row, *tried}
        return best

    def _along(self, row: int, start: Visit) -> tuple[Visit, Visit]:
        """The visit with the best bound over all prices of a row, and one of choices that keep the row.

        The bound is a concave function of one price, the least of a line per choices: two lines, one of each
        side, cross above it.
        """
        prices = start.prices.copy()
        prices[row] = 0.0
        low = start if start.over[row] > 0 else self._visit(prices)
        best = max(start, low, key=lambda v: v.bound)
        high = self._least(row, prices.copy())
        if self.done or low.over[row] <= 0:
            return best, low
        for _ in range(STEPS):
            slope = float(low.over[row] - high.over[row])
            price = (high.without(row) - low.without(row)) / slope if slope > 0 else 0.0
            if price <= 0 or self.clock.over:
                break
            top = low.without(row) + price * float(low.over[row])
            prices[row] = price
            found = self._visit(prices.copy())
            best = max(best, found, key=lambda v: v.bound)
            room = max(self.cut - top, 0.0) if math.isfinite(self.cut) else 0.0
            if found.bound > self.cut or top - found.bound <= ROUNDED * abs(top) + WORTH * room:
                break
            if found.over[row] > 0:
                low = found
            else:
                high = found
        return best, high

    def _least(self, row: int, prices: Floats) -> Visit:
        """The choices that use least of a row: without any within its limit, nothing is feasible."""
        costs = self._used(row)
        if costs.least > self.uses.limits[row] + self.slack[row]:
            self.done = True
        return Visit(prices, -math.inf, costs, *self._met(costs))

    def _used(self, row: int) -> Costs:
        counted = [np.zeros(len(values)) for values in self.values]
        for number, table in self.uses.tables.items():
            counted[number] = table[row]
        return spread(self.tree, counted)

    # -- less ------------------------------------------------------------------------------------------------

    def _shrink(self, best: Visit) -> None:
        """Takes out what no better answer has, by its cost and by each row that was seen to be overfull."""
        above = self.constant - float(best.prices @ self.uses.limits)
        self._keep([costs + above <= self.cut for costs in best.costs.marginals()])
        for row in np.flatnonzero(self.seen).tolist():
            if self.stops():
                return
            limit = self.uses.limits[row] + self.slack[row]
            self._keep([used <= limit for used in self._used(row).marginals()])

    def _keep(self, rows: list[Bools]) -> None:
        self.tree = self.tree.within(rows)
        self.done = not all(map(len, self.tree.buckets))

    # -- what is left ----------------------------------------------------------------------------------------

    def _list(self, best: Visit, most: int) -> bool:
        """Looks at what may be better, at most so much of it; whether all was seen, or something learnt."""
        rows, cut = np.flatnonzero(self.seen), self.cut
        if self.tree.rows * (2 + len(rows)) > NUMBERS:
            return False
        priced, plain = self._visit(best.prices).costs, spread(self.tree, self.values)
        if self.done:
            return True
        costs = [priced, plain, *map(self._used, rows.tolist())]
        paid = np.array([float(best.prices @ self.uses.limits), 0.0]) - self.constant
        top, room = np.array([_most(priced), _most(plain)]), (self.uses.limits + self.slack)[rows]

        def limits() -> Floats:
            return np.concatenate([np.minimum(self.cut + paid, top), room])

        listed = listing.within(self.tree, costs, limits, most, lambda: self.clock.over, self.every)
        for batch, spent in listed:
            if batch is None:
                self.listed += spent
                return self.cut < cut
            if self._look(batch):
                self.listed += spent
                return True
        self.done = True
        return True

    def _look(self, batch: Ints) -> bool:
        """Evaluates the cheapest of many feasible choices; whether another row is seen to forbid some,
        or one that was thought to be kept."""
        known = int(self.seen.sum()), self.every
        cost = np.full(len(batch), self.constant)
        for number, values in enumerate(self.values):
            k, index = self.tree.homes[number]
            cost += values[index[batch[:, k]]]
        better = cost <= self.cut
        batch, cost = batch[better], cost[better]
        over = np.repeat(-self.uses.limits[None], len(batch), axis=0)
        for number, table in self.uses.tables.items():
            k, index = self.tree.homes[number]
            over += table.T[index[batch[:, k]]]
        fits = np.all(over <= self.slack, axis=1)
        for place in np.argsort(np.where(fits, cost, np.inf), kind="stable").tolist():
            if not fits[place] or cost[place] > self.cut:
                break
            found = self.incumbent.evaluate(chosen(self.tree, batch[place].tolist(), len(self.problem.sizes)))
            self.every |= not found.feasible  # it may have replaced others that are
        for place in np.flatnonzero(~fits)[:1]:
            self.seen[int(np.argmax(over[place] / self.scales))] = True
        return (int(self.seen.sum()), self.every) != known


def _most(costs: Costs) -> float:
    """What no assignment costs more than."""
    most = math.fsum([costs.least, *(float(found.max()) for found in costs.regrets())])
    return most + ROUNDED * abs(most)


def price(incumbent: Incumbent, clock: Clock) -> ResidualProblem | None:
    """Improves `incumbent` and its bound; returns the remaining problem, or None if nothing better remains.

    A problem that is too large, or without choices, is returned unchanged.
    """
    problem = incumbent.problem
    if not 0 < len(problem.variables) <= VARIABLES or math.isinf(constant(problem)):
        return ResidualProblem.whole(problem)
    rows = tuple(row for row in problem.all_rows() if math.isfinite(row.limit))
    tables = tabled(problem)
    used = uses(rows, tables, problem.sizes, NUMBERS)
    if used is None:
        return ResidualProblem.whole(problem)
    tree = grow([relation for relation, _ in tables.values()], problem.sizes, JOINED, TOGETHER)
    if not tree.exact:
        return ResidualProblem.whole(problem)
    priced = LagrangianSearch(incumbent, clock, tree, tables, used)
    priced.run()
    if priced.done:
        return None
    if clock.over:
        return ResidualProblem.whole(problem)
    return rest(problem, priced.tree, priced.values, rows, used, priced.constant)
