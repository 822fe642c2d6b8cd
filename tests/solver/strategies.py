"""Random small problems: dense and sparse tables, forbidden cells, rows, intervals."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from layoutopt.solver import ChoiceVariable, Intervals, Problem, ResourceRow, RowTerm, Sparse, Term, Usage
from layoutopt.solver.files import FORMAT
from layoutopt.solver.form import CostTable, Scope


def table(rng: np.random.Generator, shape: tuple[int, ...], whole: bool, forbidden: float) -> np.ndarray:
    values = rng.integers(0, 12, shape).astype(float)
    if not whole:
        values += rng.random(shape)
    values[rng.random(shape) < forbidden] = math.inf
    return values


def sparse(rng: np.random.Generator, shape: tuple[int, ...], whole: bool, keep: float) -> Sparse:
    cells = np.indices(shape).reshape(len(shape), -1).T
    cells = cells[rng.random(len(cells)) < keep]
    values = rng.integers(0, 12, len(cells)).astype(float)
    return Sparse(cells, values if whole else values + rng.random(len(cells)))


def random_problem(seed: int, whole: bool) -> Problem:
    """A problem of at most about 1500 choice vectors; often feasible, not always."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    sizes = tuple(int(size) for size in rng.integers(1, 5, count))
    variables = tuple(ChoiceVariable(f"v{i}", size) for i, size in enumerate(sizes))
    terms = []
    for number in range(int(rng.integers(1, 9))):
        scope = tuple(int(i) for i in rng.permutation(count)[: int(rng.integers(0, min(count, 4) + 1))])
        shape = tuple(sizes[i] for i in scope)
        if len(scope) > 1 and rng.random() < 0.3:
            terms.append(Term(scope, sparse(rng, shape, whole, 0.85), f"t{number}"))
        else:
            terms.append(Term(scope, table(rng, shape, whole, 0.15 if scope else 0.0), f"t{number}"))
    return Problem(
        f"random {seed}",
        variables,
        tuple(terms),
        tuple(_row(rng, f"r{number}", sizes, whole) for number in range(int(rng.integers(0, 4)))),
        _intervals(rng, sizes) if rng.random() < 0.6 else None,
        constant=float(rng.integers(-3, 4)),
    )


def _row(rng: np.random.Generator, name: str, sizes: tuple[int, ...], whole: bool) -> ResourceRow:
    entries = []
    for _ in range(int(rng.integers(1, 4))):
        scope = tuple(
            int(i) for i in rng.permutation(len(sizes))[: int(rng.integers(0, min(len(sizes), 3) + 1))]
        )
        shape = tuple(sizes[i] for i in scope)
        if len(scope) > 1 and rng.random() < 0.3:
            entries.append(RowTerm(scope, sparse(rng, shape, whole, 0.5)))
        else:
            entries.append(RowTerm(scope, table(rng, shape, whole, 0.0) - 2.0))
    return ResourceRow(name, float(rng.integers(0, 9 * len(entries))), tuple(entries))


def _intervals(rng: np.random.Generator, sizes: tuple[int, ...]) -> Intervals:
    usages = []
    for _ in range(int(rng.integers(1, 8))):
        variable = int(rng.integers(len(sizes)))
        start = int(rng.integers(0, 8))
        uses = rng.integers(0, 10, sizes[variable]).astype(float)
        usages.append(Usage(variable, start, start + int(rng.integers(0, 5)), uses))
    return Intervals(float(rng.integers(4, 25)), tuple(usages))


problems = st.builds(random_problem, st.integers(0, 2**32 - 1), st.booleans())


def contest_instance(seed: int, nodes: int = 40) -> dict[str, object]:
    """A small instance in the contest's format: a chain of operations with side inputs, forbidden cells,
    tight memory.
    """
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 6, nodes)]
    intervals = [[i, i + int(rng.integers(0, 12))] for i in range(nodes)]
    usages = [[int(use) for use in rng.integers(1, 50, size)] for size in sizes]
    ends, costs = [], []
    for second in range(1, nodes):
        for first in {second - 1, int(rng.integers(0, second))}:
            cells = rng.integers(0, 200, (sizes[first], sizes[second]))
            cells[rng.random(cells.shape) < 0.5] = 0
            forbidden = rng.random(cells.shape) < 0.15
            forbidden[rng.integers(sizes[first]), :] = False
            ends.append([first, second])
            costs.append(
                [10**18 if no else int(cost) for cost, no in zip(cells.flat, forbidden.flat, strict=True)]
            )
    least, most = (
        [
            sum(pick(use) for (a, b), use in zip(intervals, usages, strict=True) if a <= t < b)
            for t in range(nodes + 12)
        ]
        for pick in (min, max)
    )
    return {
        "problem": {
            "name": f"synthetic-{seed}",
            "nodes": {
                "intervals": intervals,
                "costs": [[int(cost) for cost in rng.integers(0, 100, size)] for size in sizes],
                "usages": usages,
            },
            "edges": {"nodes": ends, "costs": costs},
            "usage_limit": (2 * max(least) + max(most)) // 3,
        }
    }


def dump(problem: Problem, path: str | Path) -> None:
    """Writes `problem` in our form, gzipped if the path ends in .gz; `load` gives an equal problem."""
    data = json.dumps(to_json(problem), allow_nan=False).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def to_json(problem: Problem) -> dict[str, Any]:
    """The JSON object of our own form."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "name": problem.name,
        "constant": problem.constant,
        "variables": [
            {"name": v.name, "labels": list(v.labels)} if v.labels else {"name": v.name, "size": v.size}
            for v in problem.variables
        ],
        "terms": [{"name": term.name, **_table_json(term.scope, term.table)} for term in problem.terms],
        "rows": [
            {
                "name": row.name,
                "limit": row.limit,
                "entries": [_table_json(entry.scope, entry.table) for entry in row.entries],
            }
            for row in problem.rows
            if math.isfinite(row.limit)
        ],
    }
    if problem.intervals:
        data["intervals"] = {
            "name": problem.intervals.name,
            "limit": problem.intervals.limit,
            "usages": [
                {"variable": u.variable, "start": u.start, "end": u.end, "table": u.table.tolist()}
                for u in problem.intervals.usages
            ],
        }
    return data


def _table_json(scope: Scope, table: CostTable) -> dict[str, Any]:
    if isinstance(table, Sparse):
        values = [None if value == math.inf else value for value in table.values.tolist()]
        return {"scope": list(scope), "assignments": table.assignments.tolist(), "values": values}
    return {"scope": list(scope), "table": np.where(np.isinf(table), None, table).tolist()}  # type: ignore[call-overload]
