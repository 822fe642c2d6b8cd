"""Why a problem is infeasible: a minimal set of rows that cannot hold together, by QuickXplain (Junker, AAAI
2004)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from layoutopt.runtime.clock import Clock
from layoutopt.solver.answer import Status
from layoutopt.solver.form import Problem
from layoutopt.solver.solve import solve


def conflict(problem: Problem, time_limit: float | None = None) -> tuple[str, ...] | None:
    """The names of rows of an infeasible problem that cannot hold together, earlier ones rather than later
    ones; () if it is infeasible without any. If the time ends first, some are needless, or it is None."""
    clock, rows, late = Clock(time_limit), {row.name: row for row in problem.rows}, False
    base = replace(problem, terms=tuple(term.legal for term in problem.terms))

    def possible(names: Sequence[str]) -> bool:
        """Whether the problem can hold with these rows; what is unknown counts as impossible."""
        nonlocal late
        if late or (late := clock.over):
            return False
        answer = solve(replace(base, rows=tuple(rows[name] for name in names)), time_limit=clock.left)
        late = answer.status is Status.LIMIT
        return answer.choices is not None

    def needed(held: list[str], fresh: list[str], names: list[str]) -> list[str]:
        """The members of `names` needed on top of `held`, to which `fresh` was just added."""
        if fresh and not possible(held):
            return []
        if len(names) == 1:
            return names
        first, second = names[: len(names) // 2], names[len(names) // 2 :]
        of_second = needed(held + first, first, second)
        return needed(held + of_second, of_second, first) + of_second

    if not possible([]):
        return None if late else ()
    return tuple(needed([], [], [*rows]))
