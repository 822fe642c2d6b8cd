"""All assignments of an exact join tree that stay within several limits at once, many at a time.

Each limit is on a sum of costs over the tree's relations. The slack of an assignment is bounded by that of
its beginning: the regrets of its rows so far (`messages`) are never recovered. Among two beginnings with the
same continuations, one that has at least as much slack in every limit replaces the other (dominance in
dynamic programs, Weingartner and Ness 1967).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.solver.form import Bools, Floats, Ints
from layoutopt.solver.join_tree import Costs, JoinTree, codes

AT_ONCE = 1 << 12
"""Beginnings that are continued together."""
COMPARED = 8
"""Number of others with which each beginning is compared."""


@dataclass(frozen=True, eq=False)
class _Beginnings:
    """Beginnings of assignments: rows of the buckets from `next` + 1 on, and what is left of every limit."""

    next: int
    rows: Ints
    left: Floats


def within(
    tree: JoinTree,
    costs: Sequence[Costs],
    limits: Callable[[], Floats],
    most: float,
    over: Callable[[], bool],
    every: bool = False,
) -> Iterator[tuple[Ints | None, int]]:
    """Batches of assignments, (some, buckets) rows, that stay within `limits()` of `costs`, those with most
    left of the first limit first; then None if `most` beginnings were not enough, or if it was `over`. With
    each, the number of beginnings so far.

    Args:
      limits: read repeatedly, because they may fall.
      every: also those that others replace.
    """
    regrets = [np.stack(found, axis=1) for found in zip(*(c.regrets() for c in costs), strict=True)]
    count = len(tree.buckets)
    first = limits()
    stack = [_Beginnings(count - 1, np.zeros((1, count), np.int64), (first - [c.least for c in costs])[None])]
    spent = 0
    while stack:
        begun = stack.pop()
        keep = (begun.left >= first - limits()).all(axis=1)
        rows, left = begun.rows[keep], begun.left[keep]
        if begun.next < 0:
            if len(rows):
                yield rows, spent
            continue
        rows, left = _continued(tree, begun.next, rows, left, regrets[begun.next])
        spent += len(rows)
        if spent > most or over():
            yield None, spent
            return
        if not every:
            keep = _kept(tree, begun.next, rows, left)
            rows, left = rows[keep], left[keep]
        order = np.argsort(-left[:, 0], kind="stable")
        for part in np.array_split(order, max(1, -(-len(order) // AT_ONCE)))[::-1]:
            stack.append(_Beginnings(begun.next - 1, rows[part], left[part]))


def _continued(tree: JoinTree, k: int, rows: Ints, left: Floats, regrets: Floats) -> tuple[Ints, Floats]:
    """Every beginning with every row of bucket k that agrees with it and stays within what is left."""
    bucket, given = tree.buckets[k], _given(tree, k, rows)
    counts = bucket.begins[given + 1] - bucket.begins[given]
    which = np.repeat(np.arange(len(rows)), counts)
    new = np.arange(len(which)) + np.repeat(bucket.begins[given] - (np.cumsum(counts) - counts), counts)
    rest = left[which] - regrets[new]
    keep = (rest >= 0).all(axis=1)
    found = rows[which[keep]]
    found[:, k] = new[keep]
    return found, rest[keep]


def _given(tree: JoinTree, k: int, rows: Ints) -> Ints:
    """The message that every beginning gives to bucket k: 0 where there is nothing before it."""
    parent = tree.parents.get(k)
    return np.zeros(len(rows), np.int64) if parent is None else parent[1][rows[:, parent[0]]]


def _kept(tree: JoinTree, k: int, rows: Ints, left: Floats) -> Bools:
    """Beginnings, buckets from k on, that are not replaced by another; not all that are replaced are seen."""
    pending = [source for source in range(k) if tree.parents.get(source, (-1,))[0] >= k]
    given = [_given(tree, source, rows) for source in pending]
    alike = codes(np.stack(given, axis=1)) if given else np.zeros(len(rows), np.int64)
    order = np.lexsort((-left[:, 0], alike))
    alike, left = alike[order], left[order]
    keep = np.ones(len(rows), bool)
    for lag in range(1, min(COMPARED + 1, len(rows))):
        worse = (left[:-lag] >= left[lag:]).all(axis=1) & (alike[:-lag] == alike[lag:])
        keep[order[lag:][worse]] = False
    return keep
