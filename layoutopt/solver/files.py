"""Problem files: our own form, and that of the ASPLOS 2025 / EuroSys contest track on intra-operator
parallelism for distributed deep learning, plain or gzipped JSON.

Our own form, format "layoutopt-problem/1" (null is a forbidden cost; scopes are variable numbers, from 0):

    {"format": "layoutopt-problem/1", "name": "two", "constant": 0,
     "variables": [{"name": "batch", "labels": ["data", "none"]}, {"name": "heads", "size": 2}],
     "terms": [{"name": "attention", "scope": [0, 1], "table": [[1, 2.5], [null, 0]]},
               {"name": "rare", "scope": [0, 1], "assignments": [[0, 0], [1, 1]], "values": [3, 4]}],
     "rows": [{"name": "memory", "limit": 10, "entries": [{"scope": [0], "table": [4, 8]}]}],
     "intervals": {"name": "usage", "limit": 100,
                   "usages": [{"variable": 0, "start": 0, "end": 9, "table": [5, 7]}]}}

"constant", "rows" and "intervals" may be missing. The contest's:

    {"problem": {"name": "...", "usage_limit": 50,
                 "nodes": {"intervals": [[30, 70], ...],      half-open [start, end); empty ones use nothing
                           "costs":     [[15], [55, 65], ...], one cost per strategy of the node
                           "usages":    [[10], [25, 25], ...]}, one usage per strategy
                 "edges": {"nodes": [[0, 1], ...],            several edges may join two nodes: costs add up
                           "costs": [[30, 40], ...]}}}        row-major: entry i * strategies(second) + j

A cost of 10^18 or more means "not allowed". Source: M. D. Moffitt and P. Fegade, "The ASPLOS 2025 / EuroSys
2025 Contest on Intra-Operator Parallelism for Distributed Deep Learning", ASPLOS 2025, pp. 5-17; the
instances are in github.com/google/iopddl.

Schemas check types here, and `Problem` all that its parts have to fit. Every fault is one `ProblemError` that
names the file.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from layoutopt.solver.form import (
    ChoiceVariable,
    CostTable,
    Floats,
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
from mesh_tf_core.faults import at_path, fault_text
from mesh_tf_core.reading import check_depth, read_file, reading

FORMAT = "layoutopt-problem/1"
LARGEST_FILE = 2 << 30
"""Bytes, once unpacked."""
LARGEST_DOMAIN = 100_000
MOST_CHOICES = 20_000_000
FORBIDDEN = 1e18
EXACT = 2**53
"""Whole numbers above this are not all float64."""


def _numbers(value: Any, infinite: float = math.inf, least: float = -EXACT) -> Floats:
    """A number, a list of numbers, or lists of equal lengths, as an array; numbers from `infinite` on are
    inf, and without it null is. (Schemas of single numbers take a second for a million.)"""
    found = np.array(value, dtype=object)
    for kind in {*map(type, found.flat)} - {int, float} - ({type(None)} if infinite == math.inf else set()):
        why = {list: "all lists of one length", type(None): "not null"}.get(kind, f"not {kind.__name__}")
        raise ValueError(f"must contain only numbers, {why}")
    try:
        numbers = np.where(found == None, math.inf, found).astype(np.float64)  # noqa: E711 (of each element)
    except OverflowError:
        raise ValueError("must contain only numbers that float64 can hold") from None
    numbers[numbers >= infinite] = math.inf
    for number in numbers[np.isfinite(numbers) & ((numbers < least) | (numbers > EXACT))][:1]:
        raise ValueError(f"must contain only numbers from {least:.4g} to 2^53, not {number:.4g}")
    return numbers


FileTable = Annotated[Any, PlainValidator(_numbers)]
FileCosts = Annotated[Any, PlainValidator(partial(_numbers, infinite=FORBIDDEN, least=0.0))]
FiniteNumber = Annotated[float, Field(strict=True, ge=-EXACT, le=EXACT)]
ExactInteger = Annotated[int, Field(strict=True, ge=-EXACT, le=EXACT)]
IntegerPair = tuple[ExactInteger, ExactInteger]


class _FilePart(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)


class _VariableFile(_FilePart):
    name: str = ""
    labels: list[str] = []
    size: Annotated[ExactInteger, Field(ge=0, le=LARGEST_DOMAIN)] = 0


class _Tabled(_FilePart):
    name: str = ""
    scope: tuple[ExactInteger, ...]
    table: FileTable = None
    assignments: FileTable = None
    values: FileTable = None

    @model_validator(mode="after")
    def _one(self) -> _Tabled:
        if self.table is None and (self.assignments is None or self.values is None):
            raise ValueError("has neither a table nor assignments and their values")
        cells = np.zeros(0) if self.assignments is None else self.assignments
        if not (np.isfinite(cells) & (cells == np.floor(cells))).all():
            raise ValueError("has assignments that are no whole numbers")
        return self

    @property
    def parts(self) -> tuple[Scope, CostTable]:
        if self.assignments is None:
            return self.scope, self.table
        empty = len(self.values), len(self.scope)
        cells = self.assignments if self.assignments.size else np.zeros(empty)
        return self.scope, Sparse(cells.astype(np.int64), self.values)


class _RowFile(_FilePart):
    name: str = ""
    limit: FiniteNumber
    entries: list[_Tabled]


class _Usage(_FilePart):
    variable: ExactInteger
    start: ExactInteger
    end: ExactInteger
    table: FileTable


class _Intervals(_FilePart):
    limit: FiniteNumber
    usages: list[_Usage]
    name: str = "usage"


class _ProblemFile(_FilePart):
    name: str = "problem"
    variables: list[_VariableFile]
    terms: list[_Tabled]
    rows: list[_RowFile] = []
    intervals: _Intervals | None = None
    constant: FiniteNumber = 0.0


class _Nodes(_FilePart):
    intervals: list[IntegerPair]
    costs: list[FileCosts]
    usages: list[FileTable]


class _Edges(_FilePart):
    nodes: list[IntegerPair]
    costs: list[FileCosts]


class _Contest(_FilePart):
    name: str = "contest problem"
    nodes: _Nodes
    edges: _Edges
    usage_limit: FiniteNumber


def load(path: str | Path) -> Problem:
    """Reads a problem in our form or the contest's; raises `ProblemError` naming the path and fault."""
    with reading(f"problem file {str(path)!r}", error=ProblemError):
        data = _parsed(_bytes(Path(path)))
    try:
        if isinstance(data, dict) and "format" in data:
            return problem_from(data)
        if isinstance(data, dict) and "problem" in data:
            return contest_problem(data)
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


P = TypeVar("P", bound=_FilePart)


def _read(kind: type[P], data: Any) -> P:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"]).removeprefix(
            "."
        )
        found = f", not {json.dumps(first['input'])[:40]}" if first["type"].endswith("_type") else ""
        raise ProblemError(at_path(path or "problem", fault_text(first["msg"]) + found)) from None


def problem_from(data: dict[str, Any]) -> Problem:
    """A problem from the parsed JSON of our own form."""
    if data["format"] != FORMAT:
        raise ProblemError(
            f"the format is {str(data['format'])[:40]!r}, but this version of layoutopt reads only {FORMAT!r}"
        )
    its = _read(_ProblemFile, data)
    sizes = [len(v.labels) or v.size for v in its.variables]
    if sum(sizes) > MOST_CHOICES:
        raise ProblemError(
            f"the variables have {sum(sizes):,} choices in total; the limit is {MOST_CHOICES:,}"
        )
    variables = tuple(
        ChoiceVariable(v.name or f"variables[{n}]", size, tuple(v.labels))
        for n, (v, size) in enumerate(zip(its.variables, sizes, strict=True))
    )
    terms = tuple(Term(*term.parts, term.name or f"term {n}") for n, term in enumerate(its.terms))
    rows = tuple(
        ResourceRow(row.name or f"row {n}", row.limit, tuple(RowTerm(*e.parts) for e in row.entries))
        for n, row in enumerate(its.rows)
    )
    intervals = None
    if (found := its.intervals) is not None:
        usages = tuple(Usage(u.variable, u.start, u.end, u.table) for u in found.usages)
        intervals = Intervals(found.limit, usages, found.name)
    return Problem(its.name, variables, terms, rows, intervals, its.constant)


def contest_problem(data: dict[str, Any]) -> Problem:
    """A problem from the parsed JSON of the contest's form."""
    its = _read(_Contest, data["problem"])
    nodes, edges = its.nodes, its.edges
    if not len(nodes.intervals) == len(nodes.costs) == len(nodes.usages):
        raise ProblemError(
            f"nodes has {len(nodes.intervals)} intervals, {len(nodes.costs)} costs and {len(nodes.usages)} "
            "usages; give one of each per node"
        )
    if len(edges.nodes) != len(edges.costs):
        raise ProblemError(
            f"edges has {len(edges.nodes)} pairs of nodes but {len(edges.costs)} lists of costs; give one "
            "list per pair"
        )
    variables = tuple(ChoiceVariable(f"node {node}", len(costs)) for node, costs in enumerate(nodes.costs))
    terms = [Term((node,), costs, f"node {node}") for node, costs in enumerate(nodes.costs)]
    for edge, (pair, costs) in enumerate(zip(edges.nodes, edges.costs, strict=True)):
        sizes = [variables[node].size for node in dict.fromkeys(pair) if 0 <= node < len(variables)]
        if len(sizes) == 2 and costs.size != math.prod(sizes):
            raise ProblemError(
                f"edges.costs[{edge}] has {costs.size} costs, but its two nodes have {sizes[0]} x {sizes[1]} "
                f"strategies; give {math.prod(sizes)} costs"
            )
        # `Problem` says what is wrong with other nodes.
        terms.append(Term(pair, costs.reshape(sizes if len(sizes) == 2 else (1, -1)), f"edge {edge}"))
    live = enumerate(zip(nodes.intervals, nodes.usages, strict=True))
    usages = tuple(Usage(node, *span, table) for node, (span, table) in live)
    return Problem(its.name, variables, tuple(terms), intervals=Intervals(its.usage_limit, usages))
