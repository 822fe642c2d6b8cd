"""Why a problem is infeasible: a minimal set of facts that cannot hold together.

Facts are named groups of restrictions (a variable may only take some choices) and rows. QuickXplain (Junker,
AAAI 2004) finds a subset that is infeasible with the rest of the problem, while every smaller subset of it is
not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layoutopt.runtime.clock import Clock
from layoutopt.solver.answer import Status
from layoutopt.solver.form import Floats, Problem, ProblemError, Sparse, Term
from layoutopt.solver.solve import solve


@dataclass(frozen=True)
class ConflictGroup:
    """One group: the choices that variables (numbers) may take, and names of the problem's rows."""

    allowed: Mapping[int, tuple[int, ...]]
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conflict:
    """`names` cannot hold together (empty: the problem is infeasible without any of them).

    `minimal` is False where the time ran out first: then some of them may be needless.
    """

    names: tuple[str, ...]
    minimal: bool = True


def conflict(
    problem: Problem,
    groups: Mapping[str, ConflictGroup],
    time_limit: float | None = None,
    solver: str = "auto",
) -> Conflict | None:
    """A minimal conflicting subset of `groups`, or None if all of them can hold together.

    Rows that a group names belong to that group alone; all else in the problem always holds. Earlier groups
    are kept in preference to later ones, so list the facts in the order in which they should be blamed.
    Raises `ProblemError` for a group that names an unknown row or choice, and when nothing is known in time.
    """
    search = _ConflictSearch(problem, groups, Clock(time_limit), solver)
    names = list(groups)
    if search.possible(names):
        return None
    if search.ran_out:
        raise ProblemError(
            f"{time_limit} seconds were not enough to decide whether problem {problem.name!r} is "
            "infeasible; raise the time limit"
        )
    if not search.possible([]):
        return Conflict(())
    found = search.explain([], [], names)
    order = [name for name in names if name in set(found)]
    return Conflict(tuple(order), not search.ran_out)


class _ConflictSearch:
    def __init__(
        self, problem: Problem, groups: Mapping[str, ConflictGroup], clock: Clock, solver: str
    ) -> None:
        self.groups = groups
        self.clock = clock
        self.solver = solver
        self.ran_out = False
        rows = {row.name: row for row in problem.rows}
        for name, facts in groups.items():
            for row in facts.rows:
                if row not in rows:
                    raise ProblemError(
                        f"group {name!r} contains the row {row!r}, which the problem does not have; known "
                        f"rows: {', '.join(rows) or 'none'}"
                    )
            for variable in facts.allowed:
                if not 0 <= variable < len(problem.variables):
                    raise ProblemError(
                        f"group {name!r} contains the variable index {variable}, but the problem has "
                        f"{len(problem.variables)} variables"
                    )
        owned = {row for facts in groups.values() for row in facts.rows}
        self.rows = {name: row for name, row in rows.items() if name in owned}
        free = tuple(row for row in problem.rows if row.name not in owned)
        self.base = replace(problem, terms=tuple(_shape(term) for term in problem.terms), rows=free)

    def possible(self, names: Sequence[str]) -> bool:
        """Whether the problem can hold with these groups; unknown (out of time) counts as impossible."""
        if self.clock.over:
            self.ran_out = True
            return False
        terms = [
            Term((variable,), self._mask(name, variable, allowed), name)
            for name in names
            for variable, allowed in self.groups[name].allowed.items()
        ]
        wanted = dict.fromkeys(row for name in names for row in self.groups[name].rows)
        rows = (*self.base.rows, *(self.rows[row] for row in wanted))
        trial = replace(self.base, terms=(*self.base.terms, *terms), rows=rows)
        answer = solve(trial, self.solver, self.clock.left)
        self.ran_out |= answer.status is Status.LIMIT
        return answer.choices is not None

    def _mask(self, name: str, variable: int, allowed: Sequence[int]) -> Floats:
        size = self.base.sizes[variable]
        if any(not 0 <= choice < size for choice in allowed):
            raise ProblemError(
                f"group {name!r} allows the choices {list(allowed)} for variable "
                f"{self.base.variables[variable].name!r}, which has {size} choices (0 to {size - 1})"
            )
        mask = np.full(size, np.inf)
        mask[list(allowed)] = 0.0
        return mask

    def explain(self, held: list[str], fresh: list[str], names: list[str]) -> list[str]:
        """QuickXplain: the members of `names` needed on top of `held`, to which `fresh` was just added."""
        if fresh and not self.possible(held):
            return []
        if len(names) == 1:
            return names
        middle = len(names) // 2
        first, second = names[:middle], names[middle:]
        needed = self.explain(held + first, first, second)
        return self.explain(held + needed, needed, first) + needed


def _shape(term: Term) -> Term:
    """The term with its costs gone: only what it forbids."""
    if isinstance(term.table, Sparse):
        finite = np.isfinite(term.table.values)
        return Term(
            term.scope, Sparse(term.table.assignments[finite], np.zeros(int(finite.sum()))), term.name
        )
    return Term(term.scope, np.where(np.isinf(term.table), np.inf, 0.0), term.name)
