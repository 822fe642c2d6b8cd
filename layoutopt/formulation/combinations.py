"""Combinations of options: bounds remove assignments of tables, not only options of single decisions.

Where all layouts with some options of several decisions are slower than a known one, each of these options
may still be in a faster one. The existing tables bound each row (`problem.marginals`). A later table has no
entry for an assignment that agrees with no row of one of them, and nothing is lowered for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.formulation.tables import Assignment, Index, Table
from layoutopt.solver.form import Bools
from layoutopt.solver.relations import Relation, agree

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
