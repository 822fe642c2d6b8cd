"""The general form of a layout problem: finite choices, cost tables over a few variables each, resource rows.

Variables i = 1..n choose d_i from finite domains {0, ..., s_i - 1}. The problem is

    minimise    constant + sum_t  c_t(d restricted to scope(t))                              (1) `Term`
    subject to  c_t(...) < inf                               for every term t                (2) `Term`
                sum_e  w_{r,e}(d restricted to scope(e)) <= limit_r      for every row r     (3) `ResourceRow`
                sum_{u: start_u <= time < end_u} w_u(d_{var(u)}) <= limit  for every time    (4) `Intervals`

A table is a dense float64 array with one axis per variable of its scope, or `Sparse`: a list of assignments
with their values. An assignment that a sparse *term* does not list is forbidden; one that a sparse *row
entry* does not list uses 0. Family (4) is family (3) written compactly; `Intervals.rows` compiles the time
points that matter.

Nothing here depends on the meaning of a variable, and nothing here solves a problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mesh_tf_core.errors import UserError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Choices = tuple[int, ...]
Scope = tuple[int, ...]


class ProblemError(UserError):
    """A problem in the general form that contradicts itself; the message names the part."""


@dataclass(frozen=True)
class ChoiceVariable:
    """A choice among `size` labelled values (labels default to "0", "1", ...)."""

    name: str
    size: int
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ProblemError(
                f"variable {self.name!r} has {self.size} choices; a variable needs at least one"
            )
        if self.labels and len(self.labels) != self.size:
            raise ProblemError(
                f"variable {self.name!r} has {self.size} choices but {len(self.labels)} labels; give one "
                "label per choice"
            )
        if len(set(self.labels)) != len(self.labels):
            raise ProblemError(f"variable {self.name!r} has a duplicate label: {', '.join(self.labels)}")

    @staticmethod
    def of(name: str, labels: Iterable[str]) -> ChoiceVariable:
        """A variable that chooses among `labels`."""
        words = tuple(labels)
        return ChoiceVariable(name, len(words), words)

    def label(self, choice: int) -> str:
        """The word for `choice`."""
        return self.labels[choice] if self.labels else str(choice)


@dataclass(frozen=True, eq=False)
class Sparse:
    """A table that lists assignments (int64, (rows, variables)) and their values (float64, (rows,))."""

    assignments: Ints
    values: Floats

    def __post_init__(self) -> None:
        object.__setattr__(self, "assignments", np.ascontiguousarray(self.assignments, dtype=np.int64))
        object.__setattr__(self, "values", np.ascontiguousarray(self.values, dtype=np.float64))
        if self.assignments.ndim != 2 or self.values.shape != self.assignments.shape[:1]:
            raise ProblemError(
                f"a sparse table has assignments of shape {self.assignments.shape} and values of shape "
                f"{self.values.shape}; the shapes must be (rows, variables) and (rows,)"
            )

    @cached_property
    def index(self) -> dict[Choices, float]:
        """Assignment -> value."""
        found = dict(zip(map(tuple, self.assignments.tolist()), self.values.tolist(), strict=True))
        if len(found) != len(self.values):
            raise ProblemError("a sparse table lists the same assignment twice; merge the two entries")
        return found

    @cached_property
    def range(self) -> tuple[int, tuple[int, ...]]:
        """The smallest choice, and the largest of every variable; no assignment is listed twice."""
        if not self.assignments.size:
            _ = self.index
            return 0, ()
        most = self.assignments.max(axis=0)
        least, sizes = int(self.assignments.min()), (most + 1).tolist()
        if least < 0 or math.prod(sizes) >= 1 << 62:
            _ = self.index
        elif len(np.unique(np.ravel_multi_index(tuple(self.assignments.T), sizes))) < len(self.values):
            raise ProblemError("a sparse table lists the same assignment twice; merge the two entries")
        return least, tuple(most.tolist())


CostTable = Floats | Sparse


def _checked(owner: str, scope: Scope, table: CostTable) -> CostTable:
    """`table` as float64 without NaN, once its axes match `scope`."""
    if len(set(scope)) != len(scope):
        raise ProblemError(f"{owner} has a variable twice in its scope {scope}")
    if isinstance(table, Sparse):
        axes, values = table.assignments.shape[1], table.values
    else:
        values = table = np.asarray(table, dtype=np.float64)
        axes = table.ndim
    if axes != len(scope):
        raise ProblemError(
            f"{owner} has a table over {axes} variables, but its scope lists {len(scope)} variables"
        )
    if np.isnan(values).any():
        raise ProblemError(f"{owner} has a NaN in its table")
    return table


class Tabled:
    """Part of a problem with a table, whose `values` it lists."""

    table: CostTable

    @property
    def values(self) -> Floats:
        return self.table.values if isinstance(self.table, Sparse) else self.table


@dataclass(frozen=True, eq=False)
class Term(Tabled):
    """One summand of the objective: a cost for every assignment of `scope`; inf forbids the assignment."""

    scope: Scope
    table: CostTable
    name: str = ""

    def __post_init__(self) -> None:
        table = _checked(f"term {self.name!r}", self.scope, self.table)
        object.__setattr__(self, "table", table)
        if self.values.size and self.values.min() == -math.inf:
            raise ProblemError(f"term {self.name!r} has a cost of -inf; only +inf (forbidden) is allowed")

    @property
    def legal(self) -> Term:
        """The same prohibitions without costs."""
        free = np.where(np.isinf(self.values), math.inf, 0.0)
        table = Sparse(self.table.assignments, free) if isinstance(self.table, Sparse) else free
        return Term(self.scope, table, self.name)

    def cost(self, choices: Sequence[int]) -> float:
        """The cost under the whole problem's `choices`."""
        key = tuple(choices[i] for i in self.scope)
        if isinstance(self.table, Sparse):
            return self.table.index.get(key, math.inf)
        return float(self.table[key])


@dataclass(frozen=True, eq=False)
class RowTerm(Tabled):
    """One summand of a row: how much of the resource every assignment of `scope` uses."""

    scope: Scope
    table: CostTable

    def __post_init__(self) -> None:
        table = _checked("a row entry", self.scope, self.table)
        object.__setattr__(self, "table", table)
        if not np.isfinite(self.values).all():
            raise ProblemError(
                f"a row entry over the variables {self.scope} is infinite; to forbid an assignment, use a "
                "term with an infinite cost"
            )

    @property
    def most(self) -> float:
        """The most that it can use; what a sparse table does not list is 0."""
        if isinstance(self.table, Sparse):
            return float(self.values.max(initial=0.0))
        return float(self.values.max())

    def use(self, choices: Sequence[int]) -> float:
        """The use of the whole problem's `choices`."""
        key = tuple(choices[i] for i in self.scope)
        if isinstance(self.table, Sparse):
            return self.table.index.get(key, 0.0)
        return float(self.table[key])


@dataclass(frozen=True, eq=False)
class ResourceRow:
    """A resource with a limit: its entries may not sum to more than `limit` (inf: counted, never binding)."""

    name: str
    limit: float
    entries: tuple[RowTerm, ...]

    def __post_init__(self) -> None:
        if math.isnan(self.limit):
            raise ProblemError(f"the limit of row {self.name!r} is NaN; give a number")

    def use(self, choices: Sequence[int]) -> float:
        """The sum of the entries."""
        return math.fsum(entry.use(choices) for entry in self.entries)


@dataclass(frozen=True, eq=False)
class Usage:
    """`variable` uses `table[choice]` of the resource during the half-open interval [start, end)."""

    variable: int
    start: int
    end: int
    table: Floats

    def __post_init__(self) -> None:
        table = np.asarray(self.table, dtype=np.float64)
        object.__setattr__(self, "table", table)
        if table.ndim != 1 or not (np.isfinite(table) & (table >= 0) & (table == np.floor(table))).all():
            raise ProblemError(f"{self} must be a list with one whole number >= 0 per choice")
        if self.start < 0:
            raise ProblemError(f"{self} starts before time 0; start at 0 or later")

    def __str__(self) -> str:
        return f"the usage of variable {self.variable} in [{self.start}, {self.end})"


@dataclass(frozen=True, eq=False)
class Intervals:
    """One resource over time (4): at no time may the live usages sum to more than `limit`."""

    limit: float
    usages: tuple[Usage, ...]
    name: str = "usage"

    def __post_init__(self) -> None:
        if math.isnan(self.limit):
            raise ProblemError(f"the limit of the intervals {self.name!r} is NaN; give a number")

    @cached_property
    def points(self) -> tuple[int, ...]:
        """The times that can be a maximum: something starts there and the next event is an end."""
        live = [usage for usage in self.usages if usage.end > usage.start]
        starts = {usage.start for usage in live}
        ends = {usage.end for usage in live}
        events = sorted(starts | ends)
        following = dict(itertools.pairwise(events))
        return tuple(time for time in events if time in starts and following[time] in ends)

    def profile(self, choices: Sequence[int]) -> Floats:
        """The use of `choices` at each of `points`."""
        if not self.points:
            return np.zeros(0)
        live = [usage for usage in self.usages if usage.end > usage.start]
        uses = np.array([usage.table[choices[usage.variable]] for usage in live])
        points = np.array(self.points)
        change = np.zeros(len(points) + 1)
        np.add.at(change, np.searchsorted(points, [usage.start for usage in live]), uses)
        np.add.at(change, np.searchsorted(points, [usage.end for usage in live]), -uses)
        return np.asarray(np.cumsum(change)[:-1])

    def row(self, time: int) -> ResourceRow:
        """The limit at one time as a `ResourceRow` named "<name>@<time>"."""
        live = (usage for usage in self.usages if usage.start <= time < usage.end and usage.table.any())
        entries = tuple(RowTerm((usage.variable,), usage.table) for usage in live)
        return ResourceRow(f"{self.name}@{time}", self.limit, entries)

    def rows(self) -> Iterator[ResourceRow]:
        """A row per point in `points`; all other times are implied."""
        return (self.row(time) for time in self.points)


@dataclass(frozen=True, eq=False)
class Problem:
    """Variables, cost terms and resource rows; the module has the equations. It is checked when it is
    built.
    """

    name: str
    variables: tuple[ChoiceVariable, ...]
    terms: tuple[Term, ...]
    rows: tuple[ResourceRow, ...] = ()
    intervals: Intervals | None = None
    constant: float = 0.0
    sizes: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(variable.size for variable in self.variables))
        _unique("variable", self.name, [variable.name for variable in self.variables])
        _unique("row", self.name, [row.name for row in self.rows])
        if not math.isfinite(self.constant):
            raise ProblemError(
                f"problem {self.name!r} has the constant {self.constant}; give a finite number"
            )
        for term in self.terms:
            self._fits(f"term {term.name!r}", term.scope, term.table)
        for row in self.rows:
            for entry in row.entries:
                self._fits(f"row {row.name!r}", entry.scope, entry.table)
        for usage in self.intervals.usages if self.intervals else ():
            self._fits(f"usage [{usage.start}, {usage.end})", (usage.variable,), usage.table)

    def _fits(self, owner: str, scope: Scope, table: CostTable) -> None:
        count = len(self.sizes)
        for index in scope:
            if not 0 <= index < count:
                raise ProblemError(
                    f"{owner} uses the variable index {index}, but problem {self.name!r} has {count} "
                    "variables, numbered from 0"
                )
        sizes = tuple(self.sizes[index] for index in scope)
        if isinstance(table, Sparse):
            least, most = table.range
            if least < 0 or any(choice >= size for choice, size in zip(most, sizes, strict=False)):
                raise ProblemError(
                    f"{owner} lists an assignment with a choice out of range; its variables have {sizes} "
                    "choices"
                )
        elif table.shape != sizes:
            names = ", ".join(self.variables[index].name for index in scope)
            raise ProblemError(
                f"{owner} has a table of shape {table.shape}, but its variables ({names}) require the "
                f"shape {sizes}"
            )

    def variable(self, name: str) -> int:
        """The number of the variable called `name`."""
        for index, variable in enumerate(self.variables):
            if variable.name == name:
                return index
        raise ProblemError(f"problem {self.name!r} has no variable {name!r}")

    def all_rows(self) -> Iterator[ResourceRow]:
        """The rows, and the interval resource's rows at the times that matter."""
        yield from self.rows
        if self.intervals:
            yield from self.intervals.rows()


def _unique(kind: str, problem: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ProblemError(
            f"problem {problem!r} has two {kind}s named {twice!r}; give each {kind} a different name"
        )
