"""The K best, the frontier, conflicts: against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from layoutopt.solver import (
    ChoiceVariable,
    Conflict,
    ConflictGroup,
    Problem,
    ProblemError,
    ResourceRow,
    RowTerm,
    Status,
    Term,
    conflict,
    evaluate,
    pareto,
    solve,
    top_k,
)
from tests.solver.strategies import problems

SOME = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def feasible(problem: Problem) -> dict[tuple[int, ...], float]:
    found = {choices: evaluate(problem, choices) for choices in itertools.product(*map(range, problem.sizes))}
    return {choices: evaluation.objective for choices, evaluation in found.items() if evaluation.feasible}


@SOME
@given(problem=problems)
def test_the_k_best_are_what_enumeration_finds(problem: Problem) -> None:
    truth = sorted(feasible(problem).values())[:5]
    answers = top_k(problem, 5)
    assert len({answer.choices for answer in answers}) == len(truth)
    assert [answer.objective for answer in answers] == pytest.approx(truth, rel=1e-6, abs=1e-9)
    assert all(answer.status is Status.OPTIMAL for answer in answers)


def test_the_k_best_need_a_count() -> None:
    problem = Problem("one", (ChoiceVariable("a", 2),), ())
    assert [answer.choices for answer in top_k(problem, 9)] in ([(0,), (1,)], [(1,), (0,)])
    with pytest.raises(ProblemError, match="the number of answers is 0; give at least 1"):
        top_k(problem, 0)


def frontier(problem: Problem, names: list[str]) -> list[tuple[float, float]]:
    rows = [row for row in problem.rows if row.name in names]
    points = {(cost, max(row.use(choices) for row in rows)) for choices, cost in feasible(problem).items()}
    return sorted(p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points))


@SOME
@given(problem=problems)
def test_the_frontier_is_exact(problem: Problem) -> None:
    names = [row.name for row in problem.rows]
    if not names:
        return
    found = pareto(problem, names)
    truth = frontier(problem, names)
    assert found.complete
    assert [point.use for point in found.points] == pytest.approx([use for _, use in truth])
    assert [p.solution.objective for p in found.points] == pytest.approx(
        [c for c, _ in truth], rel=1e-6, abs=1e-9
    )


def test_the_frontier_says_when_it_is_not_all() -> None:
    rng = np.random.default_rng(2)
    entries = tuple(RowTerm((i,), np.array([9.0, 4.0, 1.0])) for i in range(6))
    terms = tuple(Term((i,), np.array([0.0, 5.0, 9.0]) + rng.random(3), f"t{i}") for i in range(6))
    problem = Problem(
        "six",
        tuple(ChoiceVariable(f"v{i}", 3) for i in range(6)),
        terms,
        (ResourceRow("memory", 60.0, entries),),
    )
    whole = pareto(problem, "memory")
    assert whole.complete
    assert len(whole.points) > 3
    first = pareto(problem, "memory", most=2)
    assert not first.complete
    assert [point.use for point in first.points] == [point.use for point in whole.points[:2]]
    with pytest.raises(ProblemError, match="problem 'six' has no row 'memry'; known rows: memory"):
        pareto(problem, "memry")


def pinned(problem: Problem, groups: dict[str, ConflictGroup], names: tuple[str, ...]) -> bool:
    """Whether enumeration finds choices that satisfy the problem with only these groups."""
    owned = {row for facts in groups.values() for row in facts.rows}
    active = {row for name in names for row in groups[name].rows}
    rows = tuple(row for row in problem.rows if row.name not in owned or row.name in active)
    kept = Problem(problem.name, problem.variables, problem.terms, rows, problem.intervals, problem.constant)
    return any(
        all(choices[v] in allowed for name in names for v, allowed in groups[name].allowed.items())
        for choices in feasible(kept)
    )


@SOME
@given(problem=problems)
def test_conflicts_are_minimal(problem: Problem) -> None:
    groups = {f"row {row.name}": ConflictGroup({}, (row.name,)) for row in problem.rows}
    groups |= {f"pin {i}": ConflictGroup({i: (size - 1,)}) for i, size in enumerate(problem.sizes)}
    found = conflict(problem, groups)
    if pinned(problem, groups, tuple(groups)):
        assert found is None
        return
    assert found is not None
    assert found.minimal
    assert not pinned(problem, groups, found.names)
    for name in found.names:
        assert pinned(problem, groups, tuple(other for other in found.names if other != name))


def test_a_conflict_is_told_in_the_names_it_was_given() -> None:
    variables = (ChoiceVariable.of("batch", ["data", "none"]), ChoiceVariable.of("heads", ["model", "none"]))
    rows = (
        ResourceRow(
            "memory", 10.0, (RowTerm((0,), np.array([3.0, 9.0])), RowTerm((1,), np.array([3.0, 9.0])))
        ),
        ResourceRow("other", 100.0, (RowTerm((0,), np.array([1.0, 1.0])),)),
    )
    problem = Problem("two", variables, (), rows)
    groups = {
        "--memory 10": ConflictGroup({}, ("memory",)),
        "--other": ConflictGroup({}, ("other",)),
        "--pin heads:": ConflictGroup({1: (1,)}),
        "--forbid batch:data": ConflictGroup({0: (1,)}),
    }
    assert conflict(problem, groups) == Conflict(("--memory 10", "--pin heads:"))
    assert conflict(problem, {"--other": groups["--other"]}) is None
    never = Problem("never", variables, (Term((0,), np.full(2, math.inf), "t"),), rows)
    assert conflict(never, groups) == Conflict(())
    with pytest.raises(
        ProblemError,
        match="group 'x' contains the row 'm', which the problem does not have; known rows: memory, other",
    ):
        conflict(problem, {"x": ConflictGroup({}, ("m",))})
    with pytest.raises(ProblemError, match="group 'x' contains the variable index 4, but the problem has"):
        conflict(problem, {"x": ConflictGroup({4: (0,)})})
    with pytest.raises(
        ProblemError, match=r"group 'x' allows the choices \[2\] for variable 'batch', which has 2"
    ):
        conflict(problem, {"x": ConflictGroup({0: (2,)})})
    assert solve(problem).status is Status.OPTIMAL
