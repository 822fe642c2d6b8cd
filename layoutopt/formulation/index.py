"""Numbers of decisions and of their options: what the general form (`layoutopt.solver`) calls them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from layoutopt.formulation.tables import Table
from layoutopt.solver.form import Ints
from layoutopt.space.decisions import Decisions
from layoutopt.space.kind import Choice


class Index:
    """Numbers of decisions and of their options."""

    def __init__(self, names: Sequence[str], decided: Decisions) -> None:
        self.number = {n: i for i, n in enumerate(names)}
        self.place = {n: {c: j for j, c in enumerate(decided.options[n])} for n in names}

    def rows(self, names: Sequence[str], assignments: Iterable[Sequence[Choice]]) -> list[list[int]]:
        places = [self.place[n] for n in names]
        return [[place[c] for place, c in zip(places, a, strict=True)] for a in assignments]

    def scope(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.number[n] for n in names)

    def listed(self, table: Table) -> Ints:
        """The assignments of a table, of shape (assignments, decisions)."""
        rows = np.array(self.rows(table.names, table.entries), np.int64)
        return rows.reshape(len(table.entries), len(table.names))
