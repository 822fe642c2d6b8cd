"""Elimination with priced rows against enumeration and against the solvers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layoutopt.runtime.clock import Clock
from layoutopt.solver import (
    ChoiceVariable,
    Problem,
    ResourceRow,
    RowTerm,
    Status,
    Term,
    evaluate,
    lagrangian,
    solve,
)
from layoutopt.solver.incumbent import Incumbent
from layoutopt.solver.lagrangian import price
from tests.solver.strategies import problems, random_problem

MANY = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def objectives(problem: Problem) -> dict[tuple[int, ...], float]:
    """The feasible choices with their objectives."""
    every = itertools.product(*map(range, problem.sizes))
    found = {choices: evaluate(problem, choices) for choices in every}
    return {choices: e.objective for choices, e in found.items() if e.feasible}


def close(first: float, second: float) -> bool:
    return first == second or math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-9)


@MANY
@given(problem=problems)
def test_the_optimum_is_found_without_a_solver(problem: Problem) -> None:
    known, answer = objectives(problem), solve(problem)
    assert answer.solver == "elimination"
    assert answer.status is (Status.OPTIMAL if known else Status.INFEASIBLE)
    if answer.choices is not None:
        assert known[answer.choices] == answer.objective
        assert close(answer.objective, min(known.values()))
        assert answer.bound <= min(known.values()) + 1e-9


@MANY
@given(problem=problems)
def test_what_is_left_holds_everything_better(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lagrangian, "PORTIONS", (0,))
        incumbent = Incumbent(problem, None, math.inf)
        left = price(incumbent, Clock(None))
    known = objectives(problem)
    least = min(known.values(), default=math.inf)
    assert incumbent.bound <= least + 1e-9
    if left is None:
        assert incumbent.objective == pytest.approx(least, abs=1e-9)
        return
    smaller = {left.lift(choices): cost for choices, cost in objectives(left.problem).items()}
    assert all(close(known[choices], cost) for choices, cost in smaller.items())
    better = {c for c, cost in known.items() if cost < incumbent.objective - 1e-6 * abs(incumbent.objective)}
    assert better <= set(smaller)
    for choices in smaller:
        assert left.lift(left.project(choices)) == choices


@MANY
@given(problem=problems, seed=st.integers(0, 10**6))
def test_upper_bounds_are_kept(problem: Problem, seed: int) -> None:
    known = sorted(objectives(problem).items(), key=lambda found: found[1])
    if len(known) < 3:
        return
    upper = known[seed % len(known)][1]
    assert solve(problem, upper_bound=upper).objective == pytest.approx(known[0][1])
    below = known[0][1] - 1e-3
    assert solve(problem, upper_bound=below).status is Status.INFEASIBLE


def storages(count: int, rows: int, seed: int) -> Problem:
    """Like variables of a layout: a chain of shapes, and for each of many arrays where it is kept; the rows
    are nearly parallel."""
    rng = np.random.default_rng(seed)
    variables = [ChoiceVariable(f"v{i}", 4) for i in range(count)]
    terms = [Term((i,), np.sort(rng.random(4)) * 9, f"u{i}") for i in range(count)]
    terms += [Term((i, i + 1), rng.random((4, 4)) * 3, f"p{i}") for i in range(0, count - 1, 2)]
    base = [np.sort(rng.integers(1, 60, 4))[::-1].astype(float) for _ in range(count)]
    limited = []
    for number in range(rows):
        entries = tuple(RowTerm((i,), table + rng.integers(0, 9, 4)) for i, table in enumerate(base))
        least = sum(float(np.asarray(e.table).min()) for e in entries)
        most = sum(float(np.asarray(e.table).max()) for e in entries)
        limited.append(ResourceRow(f"r{number}", least + 0.3 * (most - least), entries))
    return Problem("storages", tuple(variables), tuple(terms), tuple(limited))


@pytest.mark.parametrize("seed", range(3))
def test_many_rows_and_a_solver_agree(seed: int) -> None:
    problem = storages(12, 20, seed)
    answer, other = solve(problem), solve(problem, "cp-sat")
    assert (answer.solver, answer.status, other.status) == ("elimination", Status.OPTIMAL, Status.OPTIMAL)
    assert answer.objective == pytest.approx(other.objective, rel=1e-8)
    assert answer.bound <= other.objective


def test_what_is_not_listed_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = storages(12, 20, 1)
    whole = solve(problem)
    monkeypatch.setattr(lagrangian, "PORTIONS", (0,))
    heard: list[tuple[float, float]] = []
    answer = solve(problem, on_progress=lambda best, bound: heard.append((best, bound)))
    assert (answer.solver, answer.status) == ("cp-sat", Status.OPTIMAL)
    assert answer.objective == pytest.approx(whole.objective, rel=1e-8)
    assert all(bound <= answer.objective for _, bound in heard)


def test_the_least_level_under_many_rows() -> None:
    """The objective is a level that only rows link to the rest, as in the search for the least memory."""
    problem = storages(8, 6, 5)
    levels = np.geomspace(20.0, 600.0, 17)
    room = RowTerm((8,), -levels)
    rows = tuple(replace(row, limit=0.0, entries=(*row.entries, room)) for row in problem.rows)
    terms = (Term((8,), np.arange(17.0), "level"),)
    problem = Problem("levels", (*problem.variables, ChoiceVariable("level", 17)), terms, rows)
    answer, other = solve(problem), solve(problem, "cp-sat")
    assert answer.solver == "elimination"
    assert 0 < answer.objective == other.objective < 16
    assert answer.bound == answer.objective


def test_a_hint_and_a_limit_that_leaves_no_time() -> None:
    problem = storages(12, 20, 2)
    least = tuple(3 for _ in problem.variables)
    answer = solve(problem, time_limit=1e-6, hint=least)
    assert answer.choices is not None
    assert answer.objective <= evaluate(problem, least).objective
    assert answer.bound <= solve(problem).objective


def test_what_is_too_large_comes_back_whole() -> None:
    problem = random_problem(3, True)
    large = Problem("large", tuple(ChoiceVariable(f"v{i}", 2) for i in range(300)), ())
    rng = np.random.default_rng(0)
    pairs = itertools.combinations(range(24), 2)
    dense = Problem(
        "dense",
        tuple(ChoiceVariable(f"v{i}", 8) for i in range(24)),
        tuple(Term(pair, rng.random((8, 8)), f"t{pair}") for pair in pairs),
    )
    for whole in (large, dense):
        left = price(Incumbent(whole, None, math.inf), Clock(None))
        assert left is not None
        assert left.problem is whole
        choices = tuple(i % size for i, size in enumerate(whole.sizes))
        assert left.lift(left.project(choices)) == choices
    assert price(Incumbent(problem, None, math.inf), Clock(None)) is None


@pytest.mark.parametrize(("limit", "status"), [(2.0, Status.OPTIMAL), (1.0, Status.INFEASIBLE)])
def test_a_problem_in_which_nothing_is_chosen(limit: float, status: Status) -> None:
    row = ResourceRow("bytes", limit, (RowTerm((), np.array(2.0)),))
    answer = solve(Problem("fixed", (), (Term((), np.array(3.0)),), (row,)))
    assert answer.status is status
    assert answer.choices == (() if status is Status.OPTIMAL else None)


def test_a_limit_may_be_a_whole_number() -> None:
    uses = (RowTerm((0,), np.array([0.5, 2.5])), RowTerm((1,), np.array([0.5, 2.5])))
    costs = tuple(Term((v,), np.array([3.0, 1.0])) for v in range(2))
    problem = Problem(
        "whole", (ChoiceVariable("a", 2), ChoiceVariable("b", 2)), costs, (ResourceRow("memory", 3, uses),)
    )
    incumbent = Incumbent(problem, None, math.inf)
    price(incumbent, Clock(None))
    assert incumbent.objective == 4.0
