"""Elimination against enumeration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutopt.solver import Problem, ProblemError, eliminate, evaluate
from layoutopt.solver.elimination import marginals, rows_below
from layoutopt.solver.join_tree import codes
from tests.solver.strategies import random_problem

seeds = st.tuples(st.integers(0, 10**6), st.booleans())


def costs(problem: Problem) -> dict[tuple[int, ...], float]:
    free = replace(problem, rows=(), intervals=None)
    every = itertools.product(*(range(size) for size in problem.sizes))
    return {choices: evaluate(free, choices).objective for choices in every}


@given(seeds)
@settings(deadline=None, max_examples=100)
def test_the_bound_is_the_optimum_without_rows(seed: tuple[int, bool]) -> None:
    problem = random_problem(*seed)
    found, least = eliminate(problem), min(costs(problem).values())
    assert found.exact
    assert found.bound == pytest.approx(least, abs=1e-9)
    best = found.best()
    assert (best is None) == math.isinf(least)
    if best is not None:
        assert costs(problem)[best] == pytest.approx(least, abs=1e-9)


@given(seeds, st.integers(1, 40))
@settings(deadline=None, max_examples=100)
def test_small_tables_only_lower_the_bound(seed: tuple[int, bool], cells: int) -> None:
    problem = random_problem(*seed)
    found, least = eliminate(problem, cells), min(costs(problem).values())
    assert found.bound <= least + 1e-9
    if found.exact:
        assert found.bound == pytest.approx(least, abs=1e-9)


@given(seeds, st.floats(0.0, 10.0))
@settings(deadline=None, max_examples=100)
def test_everything_below_a_bound_is_found_once(seed: tuple[int, bool], more: float) -> None:
    problem = random_problem(*seed)
    known = costs(problem)
    found = eliminate(problem)
    if math.isinf(found.bound):
        assert list(found.below(1e9)) == []
        return
    upper = found.bound + more
    listed = list(found.below(upper))
    assert len(listed) == len(set(listed))
    clear = 1e-6
    assert {c for c, cost in known.items() if cost < upper - clear} <= set(listed)
    assert all(known[c] < upper + clear for c in listed)


def test_what_is_not_exact_is_not_enumerated() -> None:
    problem = next(p for p in (random_problem(s, True) for s in range(99)) if not eliminate(p, 1).exact)
    with pytest.raises(ProblemError, match="too large to enumerate"):
        list(eliminate(problem, 1).below(1e9))


@given(seeds)
@settings(deadline=None, max_examples=100)
def test_marginals_are_the_best_with_each_choice(seed: tuple[int, bool]) -> None:
    problem = random_problem(*seed)
    known = costs(problem)
    for v, found in enumerate(marginals(eliminate(problem), problem.sizes)):
        for choice, cost in enumerate(found):
            least = min(c for choices, c in known.items() if choices[v] == choice)
            assert cost == pytest.approx(least, abs=1e-9)


@given(seeds)
@settings(deadline=None, max_examples=50)
def test_rows_that_are_left_are_those_of_choices_that_cost_little(seed: tuple[int, bool]) -> None:
    problem = random_problem(*seed)
    known = {choices: cost for choices, cost in costs(problem).items() if math.isfinite(cost)}
    most = sorted(known.values())[len(known) // 2] + 1e-6 if known else 0.0
    below = np.array([choices for choices, cost in known.items() if cost <= most], np.int64)
    for relation in rows_below(eliminate(problem), most):
        wanted = set(map(tuple, below.reshape(-1, len(problem.sizes))[:, list(relation.scope)].tolist()))
        assert set(map(tuple, relation.cells.tolist())) == wanted


def test_marginals_need_an_exact_elimination() -> None:
    problem = next(p for p in (random_problem(s, True) for s in range(99)) if not eliminate(p, 1).exact)
    with pytest.raises(ProblemError, match="the cost tables are too large to compute the least total cost"):
        marginals(eliminate(problem, 1), problem.sizes)


def test_codes_tell_rows_apart_in_their_order_however_many_columns() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1000, (200, 9)) // 500 * 999
    rows = np.concatenate([rows, rows[:50]])
    found = codes(rows)
    order = np.argsort(found, kind="stable")
    listed = [tuple(row) for row in rows[order].tolist()]
    assert listed == sorted(map(tuple, rows.tolist()))
    assert len(np.unique(found)) == len(np.unique(rows, axis=0))
