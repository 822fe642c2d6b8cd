"""Problem files: our own form, and the contest's (`contest`), plain or gzipped JSON.

Our own form, format "layoutopt-problem/1" (null is a forbidden cost; scopes are variable numbers, from 0):

    {"format": "layoutopt-problem/1", "name": "two", "constant": 0,
     "variables": [{"name": "batch", "labels": ["data", "none"]}, {"name": "heads", "size": 2}],
     "terms": [{"name": "attention", "scope": [0, 1], "table": [[1, 2.5], [null, 0]]},
               {"name": "rare", "scope": [0, 1], "assignments": [[0, 0], [1, 1]], "values": [3, 4]}],
     "rows": [{"name": "memory", "limit": 10, "entries": [{"scope": [0], "table": [4, 8]}]}],
     "intervals": {"name": "usage", "limit": 100,
                   "usages": [{"variable": 0, "start": 0, "end": 9, "table": [5, 7]}]}}

"constant", "rows" and "intervals" may be missing. Every fault is one `ProblemError` that names the file.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from layoutopt.solver import contest
from layoutopt.solver.form import (
    ChoiceVariable,
    CostTable,
    Intervals,
    Problem,
    ProblemError,
    ResourceRow,
    RowTerm,
    Scope,
    Sparse,
    Term,
    Usage,
)
from layoutopt.solver.numbers import amount, field, listed, numbers, whole
from mesh_tf_core.files import write_file
from mesh_tf_core.reading import check_depth, read_file, reading

FORMAT = "layoutopt-problem/1"
LARGEST_FILE = 2 << 30
"""Bytes, once unpacked."""
LARGEST_DOMAIN = 100_000
MOST_CHOICES = 20_000_000


def load(path: str | Path) -> Problem:
    """Reads a problem in our form or the contest's; raises `ProblemError` naming the path and fault."""
    with reading(f"problem file {str(path)!r}", error=ProblemError):
        data = _parsed(_bytes(Path(path)))
    try:
        if isinstance(data, dict) and "format" in data:
            return problem_from(data)
        if isinstance(data, dict) and "problem" in data:
            return contest.problem_from(data)
        raise ProblemError(
            f'the top-level object has neither "format": "{FORMAT}" nor "problem" (ASPLOS contest format)'
        )
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def _bytes(path: Path) -> bytes:
    data = read_file(path, LARGEST_FILE)
    if not data.startswith(b"\x1f\x8b"):
        return data
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        data = stream.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise OSError(errno.EFBIG, f"it is larger than {LARGEST_FILE:,} bytes when uncompressed")
    return data


def _parsed(data: bytes) -> Any:
    def refuse(word: str) -> NoReturn:
        raise ValueError(f"it contains {word}, which is not a JSON number")

    found = json.loads(data, parse_constant=refuse)
    check_depth(found)
    return found


def problem_from(data: dict[str, Any]) -> Problem:
    """A problem from the parsed JSON of our own form."""
    if data["format"] != FORMAT:
        raise ProblemError(
            f"the format is {str(data['format'])[:40]!r}, but this version of layoutopt reads only {FORMAT!r}"
        )
    variables = tuple(
        _variable(item, f"variables[{n}]") for n, item in enumerate(listed(data, "variables", "the problem"))
    )
    sizes = tuple(variable.size for variable in variables)
    if sum(sizes) > MOST_CHOICES:
        raise ProblemError(
            f"the variables have {sum(sizes):,} choices in total; the limit is {MOST_CHOICES:,}"
        )
    terms = []
    for n, item in enumerate(listed(data, "terms", "the problem")):
        where = f"terms[{n}]"
        scope, table = _table(item, where, sizes, forbidden=True)
        terms.append(Term(scope, table, _text(item, "name", where, f"term {n}")))
    rows = []
    for n, item in enumerate(listed(data, "rows", "the problem", missing_ok=True)):
        where = f"rows[{n}]"
        entries = listed(item, "entries", where)
        parts = [
            _table(entry, f"{where}.entries[{m}]", sizes, forbidden=False) for m, entry in enumerate(entries)
        ]
        limit = amount(field(item, "limit", where), f"{where}.limit")
        rows.append(
            ResourceRow(
                _text(item, "name", where, f"row {n}"), limit, tuple(RowTerm(*part) for part in parts)
            )
        )
    constant = amount(data.get("constant", 0), "constant")
    name = _text(data, "name", "the problem", "problem")
    return Problem(name, variables, tuple(terms), tuple(rows), _intervals(data.get("intervals")), constant)


def _text(item: Any, key: str, where: str, default: str) -> str:
    value = field(item, key, where, default)
    if not isinstance(value, str):
        raise ProblemError(f"{where}.{key} must be a string, not {type(value).__name__}")
    return value


def _variable(item: Any, where: str) -> ChoiceVariable:
    name = _text(item, "name", where, where)
    if "labels" in item:
        labels = listed(item, "labels", where)
        if not all(isinstance(label, str) for label in labels):
            raise ProblemError(f"{where}.labels must be a list of strings")
        return ChoiceVariable.of(name, labels)
    size = whole(field(item, "size", where), f"{where}.size")
    if size > LARGEST_DOMAIN:
        raise ProblemError(f"{where}.size is {size}; a variable can have at most {LARGEST_DOMAIN} choices")
    return ChoiceVariable(name, size)


def _table(item: Any, where: str, sizes: Sequence[int], forbidden: bool) -> tuple[Scope, CostTable]:
    scope = tuple(whole(index, f"{where}.scope") for index in listed(item, "scope", where))
    for index in scope:
        if not 0 <= index < len(sizes):
            raise ProblemError(
                f"{where}.scope contains the variable index {index}, but there are {len(sizes)} "
                "variables, numbered from 0"
            )
    if "assignments" in item:
        values = numbers(field(item, "values", where), f"{where}.values", forbidden)
        cells = [
            [whole(cell, f"{where}.assignments") for cell in _list(row, len(scope), f"{where}.assignments")]
            for row in listed(item, "assignments", where)
        ]
        return scope, Sparse(np.array(cells, dtype=np.int64).reshape(len(cells), len(scope)), values)
    shape = tuple(sizes[index] for index in scope)
    flat = _flat(field(item, "table", where), shape, f"{where}.table")
    return scope, numbers(flat, f"{where}.table", forbidden).reshape(shape)


def _list(value: Any, length: int, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        found = f"{len(value)} items" if isinstance(value, list) else type(value).__name__
        raise ProblemError(f"{where} must be a list of {length} items, not {found}")
    return value


def _flat(value: Any, shape: Sequence[int], where: str) -> list[Any]:
    """The leaves of a nested list, once each level's length matches the domains."""
    if not shape:
        return [value]
    items = _list(value, shape[0], where)
    return items if len(shape) == 1 else [leaf for item in items for leaf in _flat(item, shape[1:], where)]


def _intervals(item: Any) -> Intervals | None:
    if item is None:
        return None
    usages = []
    for n, usage in enumerate(listed(item, "usages", "intervals")):
        where = f"intervals.usages[{n}]"
        variable, start, end = (
            whole(field(usage, key, where), f"{where}.{key}") for key in ("variable", "start", "end")
        )
        usages.append(Usage(variable, start, end, numbers(field(usage, "table", where), f"{where}.table")))
    limit = amount(field(item, "limit", "intervals"), "intervals.limit")
    return Intervals(limit, tuple(usages), _text(item, "name", "intervals", "usage"))


def dump(problem: Problem, path: str | Path) -> None:
    """Writes `problem` in our form, gzipped if the path ends in .gz; `load` gives an equal problem."""
    text = json.dumps(to_json(problem), allow_nan=False)
    data = text.encode()
    packed = gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data
    write_file(path, packed, "the problem")


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
    return {"scope": list(scope), "table": _nulls(table.tolist())}


def _nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_nulls(item) for item in value]
    return None if value == math.inf else value
