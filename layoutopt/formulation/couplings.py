"""The combinations of options that a restriction allows (`layoutopt.space.restriction`).

Combinations of options: bounds remove assignments of tables, not only options of single decisions.

Where all layouts with some options of several decisions are slower than a known one, each of these options
may still be in a faster one. The existing tables bound each row (`problem.marginals`). A later table has no
entry for an assignment that agrees with no row of one of them, and nothing is lowered for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.formulation.tables import Assignment, Index, Table
from layoutopt.solver.form import Bools
from layoutopt.solver.join_tree import Relation, agree
from layoutopt.space.decisions import Decisions

FEW = 32
"""Number of entries below which a table is not reduced."""


@dataclass(frozen=True, eq=False)
class Combinations:
    """The rows that are left of tables.

    Attributes:
      relations: over the decisions of `index`.
    """

    index: Index
    relations: tuple[Relation, ...]

    def of(self, table: Table) -> Table:
        """A table with only the assignments that agree with a row of every other."""
        if len(table.entries) < FEW:
            return table
        keep = self._agree(table.names, table.entries)
        entries = {a: e for (a, e), kept in zip(table.entries.items(), keep.tolist(), strict=True) if kept}
        return Table(table.cluster, table.names, entries)

    def _agree(self, names: Sequence[str], assignments: Iterable[Assignment]) -> Bools:
        own = Relation(self.index.scope(names), np.array(self.index.rows(names, assignments), np.int64))
        keep = np.ones(len(own), bool)
        for relation in self.relations:
            # What is left of one decision alone, its options say.
            if len({*own.scope} & {*relation.scope}) > 1:
                keep &= agree(own, relation)
        return keep


def coupled(decided: Decisions, index: Index) -> Iterator[Relation]:
    """(8): the combinations that a restriction allows."""
    free = {*decided.free}
    for each in decided.couplings:
        names = sorted((n for n in each.names if n in free), key=index.number.__getitem__)
        places = [each.names.index(n) for n in names]
        rows = {tuple(row[i] for i in places) for row in each.within(decided.options).rows}
        cells = np.array(index.rows(names, sorted(rows)), np.int64).reshape(len(rows), len(names))
        yield Relation(index.scope(names), cells)


def count_layouts(decided: Decisions) -> int:
    """Combinations of options, legal or not, that agree with couplings; of those that overlap, the first."""
    left, count = dict(decided.options), 1
    for each in decided.couplings:
        if left.keys() >= {*each.names}:
            count *= len(each.rows)
            left = {name: options for name, options in left.items() if name not in each.names}
    return count * math.prod(map(len, left.values()))
