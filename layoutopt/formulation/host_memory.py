"""The row of the hosts' memory: what a device keeps on its host, whatever is running there.

    host(x) = sum over the clusters c of m_c H_c(x)

H_c is read off the cluster as it was lowered for its price, so the row counts just the bytes that the program
has there (`Program.host_bytes`), and forbids a layout if and only if the hardware's hosts have less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from layoutopt.formulation.tables import Assignment, Table
from layoutopt.problem import Entry, Row, Sparse
from mesh_tf_core.ir.program import Program

Numbered = Callable[[Sequence[str], Iterable[Assignment]], list[list[int]]]
"""Assignments of the decisions that are named, each in the numbers of its options."""
NAME = "host memory"


def host_row(
    tables: Sequence[Table],
    scope: Callable[[Sequence[str]], tuple[int, ...]],
    numbered: Numbered,
    limit: float,
) -> Row | None:
    """The row; None if no choice keeps more than `limit` bytes there.

    Args:
      scope, numbered: numbers of decisions, and of their options (`extract.Index`).
    """
    entries, most = [], 0.0
    known: dict[int, int] = {}

    def held(program: Program | None) -> int:
        if program is None:
            return 0
        if id(program) not in known:
            known[id(program)] = program.host_bytes
        return known[id(program)]

    for table in tables:
        each = [held(e.lowered[0].program) if e.lowered else 0 for e in table.entries.values()]
        values = table.cluster.multiplicity * np.array(each, float)
        if values.any():
            listed = np.array(numbered(table.names, table.entries), np.int64)
            shape = len(values), len(table.names)
            entries.append(Entry(scope(table.names), Sparse(listed.reshape(shape), values)))
            most += values.max()
    return Row(NAME, limit, tuple(entries)) if most > limit else None
