"""A problem in the general form as a 0/1 program: the exact local polytope.

Columns: x_{i,a} = 1 if variable i chooses a; for every scope S of two or more variables that a table
couples, y_{S,a} = 1 if S takes the assignment a, for the assignments that are not forbidden. With them

    sum_a x_{i,a} = 1                                  for every variable i                   (1) `groups`
    sum_{a: a_i = c} y_{S,a} = x_{i,c}                 for every scope S, i in S, choice c    (2) `_marginals`
    x_{i,c} = 0                                        for every forbidden choice c           (3) `forbidden`
    minimise sum c_i(a) x_{i,a} + sum c_S(a) y_{S,a}                                          (4) `costs`
    sum w_i(a) x_{i,a} + sum w_S(a) y_{S,a} <= limit   for every row that is asked for        (5) `resource`
    sum_i x_{i,c_i} <= n - 1                           for every excluded choice vector c     (6) `exclusion`

(2) are equalities: the relaxation is the local polytope (Wainwright and Jordan, "Graphical Models,
Exponential Families, and Variational Inference", 2008, section 4.1), far tighter than cell-wise x + x - y <=
1. If x is integer, y is integer too, so only x must be declared integer. A term whose scope is inside
   another's shares that scope's columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from layoutopt.solver.form import (
    Choices,
    CostTable,
    Floats,
    Ints,
    Problem,
    ProblemError,
    ResourceRow,
    RowTerm,
    Scope,
    Sparse,
)

DENSE_CELLS = 1 << 22
"""A table of more cells than this must be sparse to be written as columns."""


@dataclass(frozen=True, eq=False)
class JointColumns:
    """The columns start, start + 1, ... of the assignments (rows of `assignments`) of one scope."""

    scope: Scope
    assignments: Ints
    start: int

    @property
    def columns(self) -> Ints:
        """Column numbers, one per assignment."""
        return np.arange(self.start, self.start + len(self.assignments), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Constraint:
    """sum of coefficients * columns <= limit, or == limit."""

    columns: Ints
    coefficients: Floats
    limit: float
    equality: bool = False


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """Plain data; `offsets[i]` is variable i's first column, `offsets[-1]` the first joint column."""

    problem: Problem
    offsets: Ints
    joints: tuple[JointColumns, ...]
    homes: dict[frozenset[int], Scope]
    costs: Floats
    constant: float
    forbidden: Ints
    marginals: tuple[Ints, Ints, Ints]

    @property
    def columns(self) -> int:
        """The number of columns."""
        return len(self.costs)

    @property
    def groups(self) -> Iterator[Floats]:
        """The costs of each group of columns of which a solution picks exactly one."""
        for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            yield self.costs[start:end]
        for joint in self.joints:
            yield self.costs[joint.start : joint.start + len(joint.assignments)]

    def values(self, choices: Sequence[int]) -> Floats:
        """The 0/1 value of every column under `choices` (forbidden joints are all 0)."""
        values = np.zeros(self.columns)
        chosen = np.asarray(choices, dtype=np.int64)
        values[self.offsets[:-1] + chosen] = 1
        for joint in self.joints:
            found = (joint.assignments == chosen[list(joint.scope)]).all(axis=1).nonzero()[0]
            values[joint.start + found] = 1
        return values

    def choices(self, values: Floats) -> Choices:
        """The choices in a solution: each variable's largest column."""
        starts = self.offsets
        return tuple(int(np.argmax(values[starts[i] : starts[i + 1]])) for i in range(len(starts) - 1))

    def resource(self, row: ResourceRow) -> Constraint:
        """(5) for one row."""
        columns, coefficients = list[Ints](), list[Floats]()
        limit = row.limit
        for entry in row.entries:
            if len(entry.scope) == 0:
                limit -= entry.use(())
                continue
            cells, uses = self._entry(entry)
            columns.append(cells)
            coefficients.append(uses)
        if not columns:
            return Constraint(np.zeros(0, dtype=np.int64), np.zeros(0), limit)
        merged, where = np.unique(np.concatenate(columns), return_inverse=True)
        sums = np.bincount(where, weights=np.concatenate(coefficients), minlength=len(merged))
        keep = sums != 0
        return Constraint(merged[keep], sums[keep], limit)

    def _entry(self, entry: RowTerm) -> tuple[Ints, Floats]:
        if len(entry.scope) == 1:
            start = self.offsets[entry.scope[0]]
            uses = _dense(entry.table, (self.problem.sizes[entry.scope[0]],), 0.0)
            return np.arange(start, start + len(uses), dtype=np.int64), uses
        joint = self.by_scope[self.homes[frozenset(entry.scope)]]
        return joint.columns, _lookup(entry.table, entry.scope, joint, 0.0)

    @cached_property
    def by_scope(self) -> dict[Scope, JointColumns]:
        """The joint columns of each scope that has some."""
        return {joint.scope: joint for joint in self.joints}

    def exclusion(self, choices: Sequence[int]) -> Constraint:
        """(6): any choices but these."""
        columns = self.offsets[:-1] + np.asarray(choices, dtype=np.int64)
        return Constraint(columns, np.ones(len(columns)), len(columns) - 1)


def linearise(problem: Problem) -> LinearProgram:
    """Writes `problem` without its rows as a 0/1 program; rows are added with `LinearProgram.resource`."""
    offsets = np.concatenate([[0], np.cumsum(problem.sizes, dtype=np.int64)]).astype(np.int64)
    builder = _LinearBuilder(problem, offsets)
    scopes = [term.scope for term in problem.terms]
    scopes += [entry.scope for row in problem.rows for entry in row.entries]
    joints = builder.place(scopes)
    costs = builder.costs(joints)
    forbidden = np.flatnonzero(np.isinf(costs))
    costs[forbidden] = 0.0
    marginals = _marginals(problem, offsets, joints)
    return LinearProgram(
        problem, offsets, joints, builder.homes, costs, builder.constant, forbidden, marginals
    )


class _LinearBuilder:
    """The state of `linearise`: which scope's columns carry which terms."""

    def __init__(self, problem: Problem, offsets: Ints) -> None:
        self.problem = problem
        self.offsets = offsets
        self.constant = problem.constant
        self.homes, self.tables = dict[frozenset[int], Scope](), dict[Scope, list[tuple[Scope, CostTable]]]()

    def place(self, scopes: Iterable[Scope]) -> tuple[JointColumns, ...]:
        """One joint per maximal scope (larger scopes absorb the scopes inside them)."""
        wanted = sorted(
            {frozenset(scope): scope for scope in scopes if len(scope) > 1}.items(),
            key=lambda item: (-len(item[0]), sorted(item[0])),
        )
        wide, chosen = dict[int, list[frozenset[int]]](), list[Scope]()
        for members, scope in wanted:
            around = next((big for big in wide.get(scope[0], ()) if members <= big), None)
            if around is not None:
                self.homes[members] = self.homes[around]
                continue
            self.homes[members] = tuple(sorted(scope))
            chosen.append(self.homes[members])
            if len(members) > 2:
                for index in members:
                    wide.setdefault(index, []).append(members)
        self.tables = {scope: [] for scope in chosen}
        for term in self.problem.terms:
            if len(term.scope) > 1:
                self.tables[self.homes[frozenset(term.scope)]].append((term.scope, term.table))
        joints, start = [], int(self.offsets[-1])
        for scope in chosen:
            joint = JointColumns(scope, self._assignments(scope), start)
            joints.append(joint)
            start += len(joint.assignments)
        return tuple(joints)

    def _assignments(self, scope: Scope) -> Ints:
        """The assignments of `scope` that no term forbids; the smallest sparse table, if any, seeds them."""
        sizes = tuple(self.problem.sizes[index] for index in scope)
        full = [
            table
            for inner, table in self.tables[scope]
            if isinstance(table, Sparse) and len(inner) == len(scope)
        ]
        if full:
            seed = min(full, key=lambda table: len(table.values))
            inner = next(inner for inner, table in self.tables[scope] if table is seed)
            cells = seed.assignments[:, [inner.index(index) for index in scope]]
        elif math.prod(sizes) > DENSE_CELLS:
            names = ", ".join(self.problem.variables[index].name for index in scope)
            raise ProblemError(
                f"the dense tables over the variables ({names}) have {math.prod(sizes)} cells, which is "
                "too many; give sparse tables"
            )
        else:
            cells = np.indices(sizes).reshape(len(sizes), -1).T
        probe = JointColumns(scope, np.ascontiguousarray(cells, dtype=np.int64), 0)
        allowed = np.ones(len(cells), dtype=bool)
        for inner, table in self.tables[scope]:
            allowed &= np.isfinite(_lookup(table, inner, probe, math.inf))
        return probe.assignments[allowed]

    def costs(self, joints: Sequence[JointColumns]) -> Floats:
        """(4): the cost of every column, inf for the choices that are forbidden."""
        costs = np.zeros(int(self.offsets[-1]) + sum(len(joint.assignments) for joint in joints))
        for term in self.problem.terms:
            if len(term.scope) == 0:
                self.constant += term.cost(())
            elif len(term.scope) == 1:
                start, size = self.offsets[term.scope[0]], self.problem.sizes[term.scope[0]]
                costs[start : start + size] += _dense(term.table, (size,), math.inf)
        for joint in joints:
            for inner, table in self.tables[joint.scope]:
                costs[joint.columns] += _lookup(table, inner, joint, math.inf)
        return costs


def _dense(table: CostTable, sizes: tuple[int, ...], missing: float) -> Floats:
    if not isinstance(table, Sparse):
        return table
    full = np.full(sizes, missing)
    full[tuple(table.assignments.T)] = table.values
    return full


def _lookup(table: CostTable, scope: Scope, joint: JointColumns, missing: float) -> Floats:
    """The value of `table` (over `scope`) at each of the joint's assignments."""
    cells = joint.assignments[:, [joint.scope.index(index) for index in scope]]
    if not isinstance(table, Sparse):
        return table[tuple(cells.T)]
    if not len(table.values):
        return np.full(len(cells), missing)
    sizes = tuple(np.maximum(cells.max(axis=0, initial=0), table.assignments.max(axis=0)) + 1)
    if math.prod(map(int, sizes)) >= 2**62:
        return np.array([table.index.get(tuple(cell), missing) for cell in cells.tolist()], dtype=np.float64)
    wanted, known = (np.ravel_multi_index(tuple(part.T), sizes) for part in (cells, table.assignments))
    order = np.argsort(known)
    place = np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)
    return np.where(known[order[place]] == wanted, table.values[order[place]], missing)


def _marginals(problem: Problem, offsets: Ints, joints: Sequence[JointColumns]) -> tuple[Ints, Ints, Ints]:
    """(2) as triplets (row, column, +1 or -1) of equalities with right side 0."""
    rows, columns, signs = list[Ints](), list[Ints](), list[Ints]()
    count = 0
    for joint in joints:
        for axis, index in enumerate(joint.scope):
            size = problem.sizes[index]
            rows += [count + joint.assignments[:, axis], np.arange(count, count + size, dtype=np.int64)]
            columns += [joint.columns, np.arange(offsets[index], offsets[index] + size, dtype=np.int64)]
            signs += [np.ones(len(joint.assignments), dtype=np.int64), -np.ones(size, dtype=np.int64)]
            count += size
    if not rows:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(signs)
