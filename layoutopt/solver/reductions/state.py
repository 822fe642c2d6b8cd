"""The problem during reduction: mutable, indexed by variable, with a record of the inverse.

A variable that is `alive` has a unary cost vector, a pair table per neighbour, and a usage vector per
resource key; a key is (row number, -1) for a row and (start, end) for an interval. Wider tables are kept as
they are and lock their variables: a locked variable only loses forbidden choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from layoutopt.solver.form import (
    Choices,
    ChoiceVariable,
    CostTable,
    Floats,
    Intervals,
    Ints,
    Problem,
    ResourceRow,
    RowTerm,
    Scope,
    Sparse,
    Term,
    Usage,
)

PairKey = tuple[int, int]
RestoreStep = Callable[[dict[int, int]], None]
"""Fills in the choices of variables that a reduction removed or renumbered, from the others'."""
LARGEST_PAIR = 1 << 22
"""Number of cells above which a pair table is not changed."""


class ReductionState:
    """See the module."""

    def __init__(self, problem: Problem) -> None:
        count = len(problem.variables)
        self.problem = problem
        self.infeasible = False
        self.constant = problem.constant
        self.alive = [True] * count
        self.unary: list[Floats] = [np.zeros(size) for size in problem.sizes]
        self.pairs: list[dict[int, Floats]] = [{} for _ in range(count)]
        self.use: list[dict[PairKey, Floats]] = [{} for _ in range(count)]
        self.fixed_use, self.wide = dict[PairKey, float](), dict[int, tuple[Scope, CostTable]]()
        self.wide_rows, self.locked = dict[int, tuple[int, Scope, CostTable]](), dict[int, set[int]]()
        self.dirty: dict[int, None] = dict.fromkeys(range(count))
        self.back, self.forth = list[RestoreStep](), list[RestoreStep]()
        for term in problem.terms:
            self._add_term(term)
        for number, row in enumerate(problem.rows):
            for entry in row.entries:
                if len(entry.scope) == 0:
                    self.fixed_use[(number, -1)] = self.fixed_use.get((number, -1), 0.0) + entry.use(())
                elif len(entry.scope) == 1:
                    self.add_use(entry.scope[0], (number, -1), self._dense(entry.table, entry.scope, 0.0))
                else:
                    self._lock(entry.scope, 2 * len(self.wide_rows) + 1)
                    self.wide_rows[len(self.wide_rows)] = (number, entry.scope, entry.table)
        for usage in problem.intervals.usages if problem.intervals else ():
            if usage.end > usage.start:
                self.add_use(usage.variable, (usage.start, usage.end), usage.table)

    def _add_term(self, term: Term) -> None:
        scope, table = term.scope, term.table
        if len(scope) == 0:
            cost = term.cost(())
            self.infeasible |= bool(np.isinf(cost))
            self.constant += 0.0 if np.isinf(cost) else cost
        elif len(scope) > 2 or math.prod(self.problem.sizes[index] for index in scope) > LARGEST_PAIR:
            self._lock(scope, 2 * len(self.wide))
            self.wide[len(self.wide)] = (scope, table)
        elif len(scope) == 1:
            self.unary[scope[0]] = self.unary[scope[0]] + self._dense(table, scope, np.inf)
        else:
            self.add_pair(scope[0], scope[1], self._dense(table, scope, np.inf))

    def _lock(self, scope: Scope, number: int) -> None:
        for index in scope:
            self.locked.setdefault(index, set()).add(number)

    def _dense(self, table: CostTable, scope: Scope, missing: float) -> Floats:
        if not isinstance(table, Sparse):
            return table
        full = np.full(tuple(self.problem.sizes[index] for index in scope), missing)
        full[tuple(table.assignments.T)] = table.values
        return full

    def add_pair(self, first: int, second: int, table: Floats) -> None:
        """Adds a pair cost; (first, second) is the table's orientation."""
        table = self.pairs[first][second] + table if second in self.pairs[first] else table
        self.pairs[first][second] = table
        self.pairs[second][first] = table.T
        self.touch((first, second))

    def drop_pair(self, first: int, second: int) -> None:
        """Forgets a pair cost."""
        del self.pairs[first][second], self.pairs[second][first]
        self.touch((first, second))

    def add_use(self, variable: int, key: PairKey, table: Floats) -> None:
        """Adds a usage; the part that every choice uses goes to `fixed_use`."""
        uses = self.use[variable]
        table = uses.pop(key) + table if key in uses else table
        least = float(table.min())
        if least:
            self.fixed_use[key] = self.fixed_use.get(key, 0.0) + least
            table = table - least
        if table.any():
            uses[key] = table

    def touch(self, variables: Iterable[int]) -> None:
        """Marks variables whose neighbourhood changed."""
        for variable in variables:
            self.dirty[variable] = None

    def keep(self, variable: int, kept: Ints, instead: Ints | None = None) -> None:
        """Restricts the domain to `kept`; `instead[old]` is the new number of old or of its replacement."""
        self.unary[variable] = self.unary[variable][kept]
        for other, table in self.pairs[variable].items():
            smaller = np.ascontiguousarray(table[kept])
            self.pairs[variable][other] = smaller
            self.pairs[other][variable] = smaller.T
        uses = self.use[variable]
        self.use[variable] = {}
        for key, table in uses.items():
            self.add_use(variable, key, table[kept])
        for number in self.locked.get(variable, ()):
            if number % 2 == 0:
                scope, whole = self.wide[number // 2]
                self.wide[number // 2] = (scope, _sliced(whole, scope.index(variable), kept))
            else:
                row, scope, whole = self.wide_rows[number // 2]
                self.wide_rows[number // 2] = (row, scope, _sliced(whole, scope.index(variable), kept))
        self.touch([variable, *self.pairs[variable]])
        if instead is None:
            size = int(kept.max()) + 2 if len(kept) else 1
            instead = np.full(size, -1)
            instead[kept] = np.arange(len(kept))
        renumber = instead

        def back(choices: dict[int, int]) -> None:
            choices[variable] = int(kept[choices[variable]])

        def forth(choices: dict[int, int]) -> None:
            old = choices[variable]
            choices[variable] = max(int(renumber[old]), 0) if old < len(renumber) else 0

        self._record(back, forth)

    def remove(self, variable: int, follows: Callable[[dict[int, int]], int]) -> None:
        """Removes a variable (its costs have moved); `follows` computes its choice from the others'."""
        for other in list(self.pairs[variable]):
            self.drop_pair(variable, other)
        self.use[variable] = {}
        self.alive[variable] = False
        self.dirty.pop(variable, None)

        def back(choices: dict[int, int]) -> None:
            choices[variable] = follows(choices)

        def forth(choices: dict[int, int]) -> None:
            choices.pop(variable)

        self._record(back, forth)

    def _record(self, back: RestoreStep, forth: RestoreStep) -> None:
        self.back.append(back)
        self.forth.append(forth)

    def problem_now(self) -> tuple[Problem, list[int]]:
        """The remaining problem as a `Problem`, and the original number of each of its variables."""
        left = [index for index, alive in enumerate(self.alive) if alive]
        number = {index: position for position, index in enumerate(left)}
        original = self.problem
        variables = [ChoiceVariable(original.variables[index].name, len(self.unary[index])) for index in left]
        terms = [
            Term((number[i],), self.unary[i], variables[number[i]].name) for i in left if self.unary[i].any()
        ]
        for first in left:
            for second, table in self.pairs[first].items():
                if first < second:
                    terms.append(Term((number[first], number[second]), table))
        terms += [Term(tuple(number[i] for i in scope), wide) for scope, wide in self.wide.values()]
        intervals = None
        if original.intervals:
            usages = [
                Usage(number[index], *key, table)
                for index in left
                for key, table in self.use[index].items()
                if key[1] >= 0
            ]
            fixed = [(key, amount) for key, amount in self.fixed_use.items() if key[1] >= 0 and amount]
            if fixed:
                variables.append(ChoiceVariable("(fixed)", 1))
                usages += [Usage(len(left), *key, np.array([amount])) for key, amount in fixed]
            intervals = Intervals(original.intervals.limit, tuple(usages), original.intervals.name)
        rows = needed(self._row(position, number) for position in range(len(original.rows)))
        return (Problem(original.name, tuple(variables), tuple(terms), rows, intervals, self.constant), left)

    def _row(self, position: int, number: dict[int, int]) -> ResourceRow:
        row, key = self.problem.rows[position], (position, -1)
        entries = [RowTerm((number[i],), self.use[i][key]) for i in number if key in self.use[i]]
        for owner, scope, table in self.wide_rows.values():
            if owner == position:
                entries.append(RowTerm(tuple(number[index] for index in scope), table))
        return ResourceRow(row.name, row.limit - self.fixed_use.get(key, 0.0), tuple(entries))


def _sliced(table: CostTable, axis: int, kept: Sequence[int] | Ints) -> CostTable:
    if not isinstance(table, Sparse):
        return np.take(table, kept, axis=axis)
    renumber = {int(old): new for new, old in enumerate(kept)}
    chosen = np.array([cell in renumber for cell in table.assignments[:, axis].tolist()], dtype=bool)
    cells = table.assignments[chosen].copy()
    cells[:, axis] = [renumber[cell] for cell in cells[:, axis].tolist()]
    return Sparse(cells, table.values[chosen])


def choices_of(found: dict[int, int], count: int) -> Choices:
    """The dictionary as a vector."""
    return tuple(found[index] for index in range(count))


def needed(rows: Iterable[ResourceRow]) -> tuple[ResourceRow, ...]:
    """The rows that can bind; of rows with the same entries only the one with the lowest limit."""
    tightest: dict[tuple[object, ...], ResourceRow] = {}
    for row in rows:
        if math.fsum(entry.most for entry in row.entries) > row.limit:
            key = tuple(sorted(map(_key, row.entries)))
            if key not in tightest or row.limit < tightest[key].limit:
                tightest[key] = row
    return tuple(tightest.values())


def _key(entry: RowTerm) -> tuple[object, ...]:
    if isinstance(entry.table, Sparse):
        return entry.scope, entry.table.assignments.tobytes(), entry.table.values.tobytes()
    return entry.scope, b"", entry.table.tobytes()
