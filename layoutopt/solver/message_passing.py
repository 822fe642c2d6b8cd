r"""Costs on a join tree: the least over all assignments, and the least cost with each row of each bucket.

    total_b(row)   = costs of the relations in bucket b + messages of the buckets below
    message_b      = min of total_b over the rows with that message                              upward
    regret_b(row)  = total_b(row) - message_b >= 0
    marginal_b(row) = total_b(row) + (best of all the rest of the tree that agrees with it)      downward

The regrets of an assignment, one row per bucket, add up to its cost above the least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.form import Choices, Floats, Ints
from layoutopt.solver.join_tree import JoinTree


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


def chosen(tree: JoinTree, rows: Sequence[int], count: int) -> Choices:
    """The choices of all variables in one row per bucket of an exact tree."""
    found = [0] * count
    for bucket, row in zip(tree.buckets, rows, strict=True):
        found[bucket.variable] = int(bucket.choices[row])
    return tuple(found)


def positions(tree: JoinTree, rows: Sequence[int]) -> Ints:
    """(relations,) the row of every relation in one row per bucket."""
    found = np.zeros(len(tree.relations), np.int64)
    for bucket, row in zip(tree.buckets, rows, strict=True):
        for number, index in bucket.parts:
            if number < len(found):
                found[number] = index[row]
    return found
