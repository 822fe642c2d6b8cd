"""Steps on resource rows: what cannot bind goes, equal rows become one."""

from __future__ import annotations

import math
from collections.abc import Iterable

from layoutopt.solver.form import ResourceRow, RowTerm, Sparse


def needed(rows: Iterable[ResourceRow]) -> tuple[ResourceRow, ...]:
    """The rows that can bind; of rows with the same entries only the one with the lowest limit."""
    tightest: dict[tuple[object, ...], ResourceRow] = {}
    for row in rows:
        if math.fsum(_most(entry) for entry in row.entries) > row.limit:
            key = tuple(sorted(map(_key, row.entries)))
            if key not in tightest or row.limit < tightest[key].limit:
                tightest[key] = row
    return tuple(tightest.values())


def _most(entry: RowTerm) -> float:
    """The most that an entry can use."""
    if isinstance(entry.table, Sparse):
        return float(entry.table.values.max(initial=0.0))
    return float(entry.table.max())


def _key(entry: RowTerm) -> tuple[object, ...]:
    if isinstance(entry.table, Sparse):
        return entry.scope, entry.table.assignments.tobytes(), entry.table.values.tobytes()
    return entry.scope, b"", entry.table.tobytes()
