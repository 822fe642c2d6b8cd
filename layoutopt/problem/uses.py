"""What rows count, as vectors over the rows of relations, so that a price makes them costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from layoutopt.problem.form import Entry, Floats, Ints, Row, Scope, Sparse
from layoutopt.problem.relations import Relation, Tables, every, match


@dataclass(frozen=True, eq=False)
class Uses:
    """The rows (limits) of a problem over its relations.

    Attributes:
      tables: per number of a relation, (limits, its rows) what they use.
      limits: (limits,) less what is used in any case.
    """

    tables: dict[int, Floats]
    limits: Floats

    @property
    def scales(self) -> Floats:
        """(limits,) how large the numbers are that add up to a use: rounding is relative to it."""
        most = [np.abs(table).max(axis=1, initial=0.0) for table in self.tables.values()]
        return np.abs(self.limits) + np.sum(most, axis=0) + np.finfo(float).tiny


def uses(rows: Sequence[Row], tables: Tables, sizes: Sequence[int], most: int) -> Uses | None:
    """The uses of `rows`; `tables` gets the scopes of their entries too. None if they have more than `most`
    numbers.

    An entry's scope inside that of a table is allowed what the table allows there.
    """
    limits = np.array([row.limit for row in rows])
    entries: dict[Scope, list[tuple[int, Entry]]] = {}
    for number, row in enumerate(rows):
        for entry in row.entries:
            if entry.scope:
                entries.setdefault(tuple(sorted(entry.scope)), []).append((number, entry))
            else:
                limits[number] -= entry.use(())
    cells = 0
    for scope in entries:
        if scope not in tables:
            hosts = [r for known, (r, _) in tables.items() if set(scope) <= set(known)]
            if not hosts and math.prod(sizes[v] for v in scope) > most:
                return None
            found = min(hosts, key=len).onto(scope) if hosts else every(scope, sizes)
            tables[scope] = found, np.zeros(len(found))
        cells += len(tables[scope][0]) * len(rows)
    if cells > most:
        return None
    numbers = {scope: number for number, scope in enumerate(tables)}
    found_uses = {
        numbers[scope]: _added(tables[scope][0], members, len(rows)) for scope, members in entries.items()
    }
    return Uses(found_uses, limits)


def _added(relation: Relation, entries: Iterable[tuple[int, Entry]], count: int) -> Floats:
    """(limits, rows of the relation) the sum of the entries over one scope."""
    total = np.zeros((count, len(relation)))
    known: dict[tuple[Scope, int], tuple[Ints, Ints]] = {}
    for number, entry in entries:
        order, table = np.argsort(entry.scope), entry.table
        if not isinstance(table, Sparse):
            total[number] += np.transpose(table, order)[tuple(relation.cells.T)]
            continue
        origin = entry.scope, id(table.assignments)  # entries of one origin share their assignments
        if origin not in known:
            listed = Relation(relation.scope, table.assignments[:, order])
            known[origin] = match(relation, listed).pairs
        mine, others = known[origin]
        total[number, mine] += table.values[others]
    return total
