"""The general form refuses contradictions by name; `evaluate` contradicts wrong answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from layoutopt.solver import (
    ChoiceVariable,
    Intervals,
    Problem,
    ProblemError,
    ResourceRow,
    RowTerm,
    Solution,
    Sparse,
    Status,
    Term,
    Usage,
    evaluate,
)
from mesh_tf_core.errors import UserError
from tests.solver.strategies import problems


def small(**changes: object) -> Problem:
    parts = {
        "name": "small",
        "variables": (ChoiceVariable.of("batch", ["data", "none"]), ChoiceVariable("heads", 3)),
        "terms": (
            Term((0,), np.array([1.0, 2.0]), "read"),
            Term((0, 1), np.array([[1.0, 2.0, math.inf], [4.0, 0.5, 6.0]]), "attention"),
        ),
        "rows": (
            ResourceRow(
                "memory",
                10.0,
                (RowTerm((0,), np.array([4.0, 8.0])), RowTerm((1,), np.array([1.0, 2.0, 3.0]))),
            ),
        ),
        "intervals": Intervals(
            9.0, (Usage(0, 0, 4, np.array([5.0, 1.0])), Usage(1, 3, 6, np.array([4.0, 5.0, 9.0])))
        ),
    }
    return Problem(**{**parts, **changes})  # type: ignore[arg-type]


def test_evaluate_adds_up_and_names_what_is_broken() -> None:
    problem = small()
    good = evaluate(problem, (0, 0))
    assert (good.objective, good.feasible) == (2.0, True)
    over = evaluate(problem, (0, 1))
    assert [(v.row, v.use, v.limit, v.time) for v in over.violations] == [("usage@3", 10.0, 9.0, 3)]
    rows = evaluate(problem, (1, 2))
    assert [(v.row, v.use) for v in rows.violations] == [("memory", 11.0), ("usage@3", 10.0)]
    forbidden = evaluate(problem, (0, 2))
    assert (forbidden.objective, forbidden.forbidden) == (math.inf, ("attention",))


def test_evaluate_refuses_choices_that_do_not_fit() -> None:
    with pytest.raises(ProblemError, match="1 choices were given for problem 'small', which has 2 variables"):
        evaluate(small(), (0,))
    with pytest.raises(ProblemError, match="choice 3 is out of range for variable 'heads', which has 3"):
        evaluate(small(), (0, 3))
    with pytest.raises(ProblemError, match="choice -1 is out of range for variable 'batch', which has 2"):
        evaluate(small(), (-1, 0))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(problem=problems)
def test_the_points_of_an_interval_resource_imply_all_times(problem: Problem) -> None:
    resource = problem.intervals
    if resource is None:
        return
    rng = np.random.default_rng(0)
    for _ in range(5):
        choices = [int(rng.integers(size)) for size in problem.sizes]
        uses = [
            sum(u.table[choices[u.variable]] for u in resource.usages if u.start <= time < u.end)
            for time in range(20)
        ]
        profile = resource.profile(choices)
        assert max(uses) == profile.max(initial=0.0)
        assert [uses[time] for time in resource.points] == profile.tolist()
        assert [row.use(choices) for row in resource.rows()] == profile.tolist()


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: ChoiceVariable("batch", 0), "variable 'batch' has 0 choices; a variable needs at least one"),
        (lambda: ChoiceVariable("batch", 2, ("a",)), "variable 'batch' has 2 choices but 1 labels"),
        (lambda: ChoiceVariable.of("batch", ["a", "a"]), "variable 'batch' has a duplicate label: a, a"),
        (lambda: Term((0, 0), np.zeros((2, 2)), "t"), "term 't' has a variable twice in its scope"),
        (
            lambda: Term((0,), np.zeros((2, 2)), "t"),
            "term 't' has a table over 2 variables, but its scope lists 1",
        ),
        (lambda: Term((0,), np.array([0.0, math.nan]), "t"), "term 't' has a NaN"),
        (lambda: Term((0,), np.array([0.0, -math.inf]), "t"), "term 't' has a cost of -inf"),
        (lambda: RowTerm((0,), np.array([math.inf])), "a row entry over the variables .* is infinite"),
        (lambda: ResourceRow("memory", math.nan, ()), "the limit of row 'memory' is NaN"),
        (
            lambda: Usage(0, 0, 1, np.array([-1.0])),
            "the usage of variable 0 in .* one whole number >= 0 per choice",
        ),
        (lambda: Usage(0, -2, 1, np.array([1.0])), "the usage of variable 0 in .* starts before time 0"),
        (lambda: Intervals(math.nan, ()), "the limit of the intervals 'usage' is NaN"),
        (
            lambda: Sparse(np.zeros((2, 1)), np.zeros(3)),
            r"assignments of shape \(2, 1\) and values of shape \(3,\)",
        ),
        (
            lambda: small(variables=(ChoiceVariable("a", 2), ChoiceVariable("a", 3))),
            "problem 'small' has two variables named 'a'",
        ),
        (
            lambda: small(rows=(ResourceRow("m", 1.0, ()), ResourceRow("m", 1.0, ()))),
            "problem 'small' has two rows named 'm'",
        ),
        (
            lambda: small(terms=(Term((5,), np.zeros(2), "t"),)),
            "term 't' uses the variable index 5, but problem 'small' has 2",
        ),
        (
            lambda: small(terms=(Term((0, 1), np.zeros((3, 2)), "t"),)),
            r"term 't' has a table of shape \(3, 2\), but its variables \(batch, heads\) require",
        ),
        (
            lambda: small(terms=(Term((0,), Sparse(np.array([[2]]), np.zeros(1)), "t"),)),
            "term 't' lists an assignment with a choice out of range",
        ),
        (
            lambda: small(terms=(Term((0,), Sparse(np.array([[1], [1]]), np.zeros(2)), "t"),)),
            "a sparse table lists the same assignment twice",
        ),
        (lambda: small(constant=math.inf), "problem 'small' has the constant inf"),
        (lambda: small().variable("vocab"), "problem 'small' has no variable 'vocab'"),
        (
            lambda: Solution(Status.OPTIMAL, None, 0.0, 0.0, 0.0, "x"),
            "give choices exactly when a solution was found",
        ),
    ],
)
def test_contradictions_are_refused_by_name(build: object, text: str) -> None:
    with pytest.raises(UserError, match=text):
        build()  # type: ignore[operator]


def test_a_solution_tells_its_gap() -> None:
    assert Solution(Status.FEASIBLE, (0,), 200.0, 150.0, 1.0, "x").gap == 0.25
    assert Solution(Status.OPTIMAL, (0,), 200.0, 200.0, 1.0, "x").gap == 0.0
    assert Solution(Status.LIMIT, None, math.inf, 3.0, 1.0, "x").gap == math.inf
