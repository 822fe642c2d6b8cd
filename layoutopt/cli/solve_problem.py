"""`layoutopt solve-problem`: a problem file in the general form, or in the contest's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from layoutopt.cli.grouped import grouped
from layoutopt.cli.options import OUTPUT, Output, TimeLimitOption, in_time, time_limited
from layoutopt.cli.progress import Bounds
from layoutopt.cli.terminal import Terminal, facts
from layoutopt.plan.units import duration_text
from layoutopt.runtime.clock import Clock
from reports.views.view import View, texts

if TYPE_CHECKING:
    from layoutopt.solver import Problem, Solution

MOST_ROWS = 40
CONFLICT_SECONDS = 60.0
FIRST = 1.0
"""Seconds that a first answer gets where reading took the limit and none is known at once."""


@grouped
def solve_problem(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Problem file (.json or .json.gz), in layoutopt's format (docs/explanation/search.md) or "
            "that of the ASPLOS 2025 contest.",
        ),
    ],
    solver: Annotated[
        Literal["auto", "cp-sat", "highs"],
        typer.Option(help="Solver to use; auto chooses by the problem's size."),
    ] = "auto",
    time_limit: TimeLimitOption = None,
    output: Output = OUTPUT,
) -> None:
    """Solve a problem in layoutopt's format, or in that of the ASPLOS 2025 contest."""
    clock = time_limited(time_limit)  # of all that this command does
    from layoutopt.plan.results import ProblemSolver, SolveProblemResult
    from layoutopt.solver import Status, load, solve

    terminal = output.terminal
    problem = in_time(clock, str(file), lambda: load(file))
    with Bounds(terminal, problem.name, str) as bounds:
        rest = clock.rest
        found = solve(problem, solver, rest, bounds.update)
        nothing = found.status is Status.LIMIT and not found.stopped
        if nothing and rest is not None and clock.limit is not None and rest < FIRST < clock.limit:
            found = solve(problem, solver, FIRST, bounds.update)
    _refuse(problem, found, clock)
    assert found.choices is not None
    terminal.result(
        SolveProblemResult(
            name=problem.name,
            solver=ProblemSolver(
                name=found.solver,
                status=found.status.value,
                objective=found.objective,
                bound=found.bound,
                gap=found.gap,
                wall_seconds=found.wall_seconds,
            ),
            choices=list(found.choices),
        )
    )
    _show(terminal, problem, found)
    if found.stopped:
        raise KeyboardInterrupt  # the best so far is shown


def _refuse(problem: Problem, found: Solution, clock: Clock) -> None:
    """Raises the error of a problem without an answer."""
    from layoutopt.solver import Status
    from mesh_tf_core.errors import InfeasibleError, LimitError

    if found.status is Status.LIMIT and found.stopped:
        raise KeyboardInterrupt
    if found.status is Status.LIMIT:
        raise LimitError(
            f"problem {problem.name!r}: no solution found in {duration_text(found.wall_seconds)}; "
            "raise --time-limit, or choose another --solver"
        )
    if found.status is Status.INFEASIBLE:
        raise InfeasibleError(f"problem {problem.name!r} is proven infeasible: {_reason(problem, clock)}")


def _reason(problem: Problem, clock: Clock) -> str:
    """The smallest set of rows that cannot hold together, if it is known in time."""
    from layoutopt.solver import conflict

    found = conflict(problem, min(CONFLICT_SECONDS, clock.rest or CONFLICT_SECONDS))
    if found is None:
        return "no assignment satisfies all rows; there was no time to find the rows that conflict"
    if found:
        rows = {row.name: row for row in problem.rows}
        named = ", ".join(f"{name!r} (limit {rows[name].limit:g})" for name in found)
        return f"these rows conflict: {named}; raise the limit of one of these rows"
    if problem.intervals:
        limit = f"{problem.intervals.name!r} limit {problem.intervals.limit:g}"
        return f"the forbidden costs and the {limit} exclude every choice; raise the limit"
    return "the forbidden costs alone exclude every choice; remove some forbidden costs"


def _show(terminal: Terminal, problem: Problem, found: Solution) -> None:
    assert found.choices is not None
    terminal.show(
        facts(
            [
                ("problem", f"{problem.name}, {len(problem.variables)} variables"),
                ("objective", f"{found.objective:.12g}"),
                ("proven", f"at least {found.bound:.12g} (gap {100 * found.gap:.3g}%): {found.status.value}"),
                ("solver", f"{found.solver}, {duration_text(found.wall_seconds)}"),
            ]
        )
    )
    chosen = list(zip(problem.variables, found.choices, strict=True))
    rows = [(v.name, v.labels[i] if v.labels else str(i)) for v, i in chosen[:MOST_ROWS]]
    terminal.show("", View("Choices", texts("variable", "choice"), rows))
    if len(chosen) > MOST_ROWS:
        terminal.show(f"and {len(chosen) - MOST_ROWS} more; --json prints all of them")
