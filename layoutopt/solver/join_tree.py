"""The assignments that tables allow together, variable by variable: elimination needs these once, whatever
the tables' values.

A bucket belongs to one variable: it joins all relations that name it, and leaves a message, the assignments
of the other variables in it, which is a relation for the buckets after it (Dechter, "Bucket elimination",
1999). Tables of layouts allow a small part of all assignments, so the joins stay small where dense tables
would not. Costs travel through the tree as vectors (`messages`).

Where a join would have too many rows, a variable gets several buckets that need not agree on it
(mini-buckets, Dechter and Rish 2003): costs through the tree are then lower bounds.

Lists of assignments and their natural joins: the combinations of choices that sparse tables allow.

Costs on a join tree: the least over all assignments, and the least cost with each row of each bucket.

    total_b(row)   = costs of the relations in bucket b + messages of the buckets below
    message_b      = min of total_b over the rows with that message                              upward
    regret_b(row)  = total_b(row) - message_b >= 0
    marginal_b(row) = total_b(row) + (best of all the rest of the tree that agrees with it)      downward

The regrets of an assignment, one row per bucket, add up to its cost above the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from layoutopt.solver.form import Bools, Floats, Ints, Scope

LARGEST_CODE = 1 << 62


@dataclass(frozen=True, eq=False)
class Relation:
    """Distinct assignments, (rows, variables), of the variables of `scope`, which rise."""

    scope: Scope
    cells: Ints

    def __len__(self) -> int:
        return len(self.cells)

    def columns(self, scope: Sequence[int]) -> Ints:
        """(rows, scope) the choices of some of its variables."""
        return self.cells[:, [self.scope.index(v) for v in scope]]

    def onto(self, scope: Scope) -> Relation:
        """The distinct assignments of some of its variables."""
        cells = self.columns(scope)
        return Relation(scope, cells[np.unique(codes(cells), return_index=True)[1]])


TablesByScope = dict[Scope, tuple[Relation, Floats]]
"""The allowed assignments of each scope, and the cost of each row."""


@dataclass(frozen=True, eq=False)
class Matches:
    """The rows of a second relation that agree with each row of a first one: `order[low:high]`."""

    low: Ints
    high: Ints
    order: Ints

    @property
    def count(self) -> int:
        """Rows of the join."""
        return int((self.high - self.low).sum())

    @property
    def pairs(self) -> tuple[Ints, Ints]:
        """(rows of the first, rows of the second) that agree, in the first's order."""
        counts = self.high - self.low
        first = np.repeat(np.arange(len(counts)), counts)
        skipped = np.repeat(self.low - (np.cumsum(counts) - counts), counts)
        return first, self.order[np.arange(len(first)) + skipped]


def match(first: Relation, second: Relation) -> Matches:
    """The rows that agree in all variables that both have."""
    shared = [v for v in first.scope if v in second.scope]
    both = codes(np.concatenate([first.columns(shared), second.columns(shared)]))
    mine, others = both[: len(first)], both[len(first) :]
    order = np.argsort(others, kind="stable")
    ranked = others[order]
    return Matches(np.searchsorted(ranked, mine, "left"), np.searchsorted(ranked, mine, "right"), order)


def agree(first: Relation, second: Relation) -> Bools:
    """The rows of a relation that agree with a row of a second one in all variables that both have."""
    matches = match(first, second)
    return matches.low < matches.high


def join(first: Relation, second: Relation, pairs: tuple[Ints, Ints]) -> Relation:
    """All assignments that agree with both, by the `pairs` of their match."""
    mine, others = pairs
    scope = tuple(sorted({*first.scope, *second.scope}))
    cells = np.empty((len(mine), len(scope)), np.int64)
    for k, v in enumerate(scope):
        known = v in first.scope
        relation, rows = (first, mine) if known else (second, others)
        cells[:, k] = relation.cells[rows, relation.scope.index(v)]
    return Relation(scope, cells)


def codes(cells: Ints) -> Ints:
    """(rows,) a number for every row: equal for equal rows, rising in lexicographic order."""
    found, most = np.zeros(len(cells), np.int64), 1
    for column in cells.T:
        size = int(column.max(initial=0)) + 1
        if most * size >= LARGEST_CODE:
            found, most = np.unique(found, return_inverse=True)[1], len(cells)
        found = found * size + column
        most *= size
    return found


def every(scope: Scope, sizes: Sequence[int]) -> Relation:
    """All assignments of some variables."""
    shape = [sizes[v] for v in scope]
    return Relation(scope, np.indices(shape).reshape(len(shape), -1).T)


@dataclass(frozen=True, eq=False)
class Bucket:
    """One variable with all that is joined over it; rows with the same message are neighbours.

    Attributes:
      choices: (rows,) of the variable.
      parts: relations, and the row of each that belongs to each row here; messages are numbered after the
        tree's relations, in the order of their buckets.
      group: (rows,) the row of the message; rises.
      begins: (messages + 1,) the first row of each row of the message.
    """

    variable: int
    scope: Scope
    choices: Ints
    parts: tuple[tuple[int, Ints], ...]
    group: Ints
    begins: Ints

    def __len__(self) -> int:
        return len(self.choices)

    def masked(self, keep: Bools) -> Bucket:
        """Some of the rows; the message keeps its numbers."""
        group = self.group[keep]
        parts = tuple((number, rows[keep]) for number, rows in self.parts)
        begins = np.searchsorted(group, np.arange(len(self.begins)))
        return replace(self, choices=self.choices[keep], parts=parts, group=group, begins=begins)


@dataclass(frozen=True, eq=False)
class JoinTree:
    """Buckets in the order of elimination.

    Attributes:
      exact: one bucket per variable.
    """

    relations: tuple[Relation, ...]
    buckets: tuple[Bucket, ...]
    exact: bool

    @property
    def rows(self) -> int:
        """Rows of all buckets."""
        return sum(map(len, self.buckets))

    def sources(self, bucket: Bucket) -> list[tuple[int, Ints]]:
        """The buckets of its incoming messages, and the row of each message."""
        first = len(self.relations)
        return [(number - first, rows) for number, rows in bucket.parts if number >= first]

    @cached_property
    def parents(self) -> dict[int, tuple[int, Ints]]:
        """The bucket that takes each bucket's message, and which message is in each row there."""
        return {
            source: (k, rows)
            for k, bucket in enumerate(self.buckets)
            for source, rows in self.sources(bucket)
        }

    @cached_property
    def homes(self) -> dict[int, tuple[int, Ints]]:
        """The bucket that holds each relation, and which of its rows is in each row there."""
        return {
            number: (k, rows)
            for k, bucket in enumerate(self.buckets)
            for number, rows in bucket.parts
            if number < len(self.relations)
        }

    def within(self, keep: Sequence[Bools]) -> JoinTree:
        """The tree with only these rows of the buckets, less those that have no partner left."""
        alive = list(keep)
        held: list[Bools] = []
        for k, bucket in enumerate(self.buckets):
            for source, rows in self.sources(bucket):
                alive[k] = alive[k] & held[source][rows]
            held.append(_marked(len(bucket.begins) - 1, bucket.group[alive[k]]))
        for k in range(len(self.buckets) - 1, -1, -1):
            for source, rows in self.sources(self.buckets[k]):
                wanted = _marked(len(held[source]), rows[alive[k]])
                alive[source] = alive[source] & wanted[self.buckets[source].group]
        return replace(self, buckets=tuple(b.masked(a) for b, a in zip(self.buckets, alive, strict=True)))

    def left(self, relation: int) -> Bools:
        """Which rows of a relation are still in its bucket."""
        return _marked(len(self.relations[relation]), self.homes[relation][1])


def _marked(count: int, rows: Ints) -> Bools:
    found = np.zeros(count, bool)
    found[rows] = True
    return found


def grow(
    relations: Sequence[Relation], sizes: Sequence[int], most: int, total: int | None = None
) -> JoinTree:
    """The tree over variables with these numbers of choices, each in some relation. The variable whose bucket
    could have the fewest rows comes first; variables without links come last.

    Args:
      most: joins of more rows are not made.
      total: require an exact tree with at most this many rows; without one the result is inexact and not
        finished.
    """
    live = dict(enumerate(relations))
    named: list[set[int]] = [set() for _ in sizes]
    for number, relation in live.items():
        for v in relation.scope:
            named[v].add(number)
    apart = [all(len(live[i].scope) == 1 for i in found) for found in named]
    weights, buckets = dict[int, int](), list[Bucket]()
    left, exact = set(range(len(sizes))), True
    while left:
        for v in left - weights.keys():
            weights[v] = math.prod(sizes[u] for u in {u for i in named[v] for u in live[i].scope})
        v = min(left, key=lambda v: (apart[v], weights[v], v))
        left.remove(v)
        members = {i: live.pop(i) for i in sorted(named[v])}
        for number, relation in members.items():
            for u in relation.scope:
                named[u].discard(number)
                weights.pop(u, None)
        groups = _joined(members, most)
        exact &= len(groups) == 1
        if total is not None and not (exact and sum(map(len, buckets)) <= total):
            return JoinTree(tuple(relations), tuple(buckets), False)
        for joined, parts in groups:
            bucket, message = _bucket(v, joined, parts)
            number = len(relations) + len(buckets)
            live[number] = message
            buckets.append(bucket)
            for u in message.scope:
                named[u].add(number)
    tree = JoinTree(tuple(relations), tuple(buckets), exact)
    return tree.within([np.ones(len(bucket), bool) for bucket in buckets])


def _joined(members: dict[int, Relation], most: int) -> list[tuple[Relation, dict[int, Ints]]]:
    """The join of all, or joins of some of them with at most `most` rows each (a relation alone may have
    more), with the rows of every member."""
    found: list[tuple[Relation, dict[int, Ints]]] = []
    left = dict(members)
    while left:
        first = min(left, key=lambda i: (len(left[i]), i))
        joined = left.pop(first)
        parts = {first: np.arange(len(joined))}
        tried = dict(left)
        while tried:
            number = _next(joined, tried)
            other = tried.pop(number)
            matches = match(joined, other)
            if matches.count > most:
                continue
            mine, others = matches.pairs
            joined = join(joined, other, (mine, others))
            parts = {i: rows[mine] for i, rows in parts.items()}
            parts[number] = others
            del left[number]
        found.append((joined, parts))
    return found


def _next(joined: Relation, others: dict[int, Relation]) -> int:
    """The one that brings the fewest new variables; before a product of small ones one that has all their
    variables: joined with it, nothing has more rows than it has."""
    scope = set(joined.scope)
    number = min(others, key=lambda i: (len(set(others[i].scope) - scope), len(others[i]), i))
    wanted = scope | set(others[number].scope)
    around = [i for i, other in others.items() if wanted <= set(other.scope)]
    widest = min(around, key=lambda i: (len(others[i]), i), default=number)
    product = len(joined) * len(others[number])
    return widest if wanted > scope and len(others[widest]) <= product else number


def _bucket(v: int, joined: Relation, parts: dict[int, Ints]) -> tuple[Bucket, Relation]:
    rest = tuple(u for u in joined.scope if u != v)
    order = np.argsort(codes(joined.columns((*rest, v))), kind="stable")
    code = codes(joined.columns(rest))[order]
    fresh = np.diff(code, prepend=-1) != 0
    begins = np.append(np.flatnonzero(fresh), len(code))
    rows = tuple((number, parts[number][order]) for number in sorted(parts))
    choices = joined.columns((v,))[order, 0]
    bucket = Bucket(v, joined.scope, choices, rows, np.cumsum(fresh) - 1, begins)
    return bucket, Relation(rest, joined.columns(rest)[order[begins[:-1]]])


@dataclass(frozen=True, eq=False)
class Costs:
    """A tree under some costs of its relations' rows.

    Attributes:
      least: no assignment costs less; one costs just that if the tree is exact.
    """

    tree: JoinTree
    totals: tuple[Floats, ...]
    messages: tuple[Floats, ...]
    least: float

    def best(self) -> list[int]:
        """Per bucket, the row of an assignment that costs least, the first of equals; `least` is finite."""
        rows = [0] * len(self.totals)
        given = [0] * len(self.totals)
        for k in range(len(rows) - 1, -1, -1):
            bucket = self.tree.buckets[k]
            begin, end = bucket.begins[given[k] : given[k] + 2]
            rows[k] = int(begin + np.argmin(self.totals[k][begin:end]))
            for source, messages in self.tree.sources(bucket):
                given[source] = int(messages[rows[k]])
        return rows

    def regrets(self) -> list[Floats]:
        """Per bucket, (rows,) cost of each row above the best with the same message."""
        pairs = zip(self.tree.buckets, self.totals, self.messages, strict=True)
        return [totals - messages[bucket.group] for bucket, totals, messages in pairs]

    def marginals(self) -> list[Floats]:
        """Per bucket, (rows,) the least that an assignment with it costs (a lower bound unless exact)."""
        found: list[Floats] = [np.zeros(0)] * len(self.totals)
        beside: dict[int, Floats] = {}
        for k in range(len(self.totals) - 1, -1, -1):
            bucket = self.tree.buckets[k]
            rest = beside[k] if k in beside else self.least - self.messages[k]
            found[k] = self.totals[k] + rest[bucket.group]
            for source, rows in self.tree.sources(bucket):
                best = np.full(len(self.messages[source]), np.inf)
                np.minimum.at(best, rows, found[k])
                with np.errstate(invalid="ignore"):  # a message that nobody uses has no rows either
                    beside[source] = best - self.messages[source]
        return found


def spread(tree: JoinTree, values: Sequence[Floats]) -> Costs:
    """The tree under `values`, one vector per relation: finite costs of its rows."""
    known = list(values)
    totals, roots = [], [0.0]
    for bucket in tree.buckets:
        total = np.zeros(len(bucket))
        for number, rows in bucket.parts:
            total += known[number][rows]
        message = np.full(len(bucket.begins) - 1, np.inf)
        used = np.flatnonzero(np.diff(bucket.begins))
        if len(used):
            message[used] = np.minimum.reduceat(total, bucket.begins[used])
        totals.append(total)
        known.append(message)
        if len(bucket.scope) == 1:
            roots.append(float(message.min(initial=np.inf)))
    return Costs(tree, tuple(totals), tuple(known[len(tree.relations) :]), math.fsum(roots))
