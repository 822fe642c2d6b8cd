"""Local search, its sweeps and its bounds against enumeration; answers whatever the limit."""

from __future__ import annotations

import itertools
import math
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from layoutopt.runtime.own_process import OtherProcess
from layoutopt.solver import (
    ChoiceVariable,
    Intervals,
    Problem,
    ResourceRow,
    RowTerm,
    Status,
    Term,
    Usage,
    evaluate,
    lagrangian,
    solve,
)
from layoutopt.solver import run as solving
from layoutopt.solver.anytime import blend
from layoutopt.solver.anytime.improve import PARTNER
from layoutopt.solver.anytime.network import Network, network
from layoutopt.solver.anytime.search import ASCENT, LocalSearch, Messages
from layoutopt.solver.anytime.sweep import EliminationOrder
from layoutopt.solver.files import contest_problem
from tests.solver.strategies import contest_instance, table

MANY = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def pairs(seed: int, whole: bool) -> Problem:
    """A small problem of unary and pair costs with rows and intervals; often feasible, not always."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    sizes = [int(size) for size in rng.integers(1, 4, count)]
    terms = [Term((i,), table(rng, (size,), whole, 0.05), f"u{i}") for i, size in enumerate(sizes)]
    for number, (a, b) in enumerate(itertools.permutations(range(count), 2)):
        if rng.random() < 0.35:
            terms.append(Term((a, b), table(rng, (sizes[a], sizes[b]), whole, 0.1), f"p{number}"))
    rows = []
    for number in range(int(rng.integers(0, 3))):
        entries = [RowTerm((i,), table(rng, (size,), whole, 0.0) - 2) for i, size in enumerate(sizes)]
        rows.append(
            ResourceRow(
                f"r{number}", float(rng.integers(0, 8 * count)), (*entries, RowTerm((), np.array(1.0)))
            )
        )
    usages = []
    for i, size in enumerate(sizes):
        start = int(rng.integers(0, 6))
        uses = rng.integers(0, 10, size).astype(float)
        usages.append(Usage(i, start, start + int(rng.integers(0, 5)), uses))
    resource = Intervals(float(rng.integers(6, 25)), tuple(usages))
    variables = tuple(ChoiceVariable(f"v{i}", size) for i, size in enumerate(sizes))
    return Problem(
        f"pairs {seed}", variables, tuple(terms), tuple(rows), resource, float(rng.integers(-3, 4))
    )


problems = st.builds(pairs, st.integers(0, 2**32 - 1), st.booleans())


def known(problem: Problem) -> Network:
    found = network(problem)
    assert found is not None
    return found


def every(problem: Problem) -> list[np.ndarray]:
    return [np.array(choices, np.int64) for choices in itertools.product(*map(range, problem.sizes))]


def least(problem: Problem) -> float:
    found = (evaluate(problem, tuple(x.tolist())) for x in every(problem))
    return min((e.objective for e in found if e.feasible), default=math.inf)


@MANY
@given(problem=problems)
@example(problem=pairs(20000000, False))
def test_a_network_says_what_the_problem_says(problem: Problem) -> None:
    found = known(problem)
    for x in every(problem):
        truth = evaluate(problem, tuple(x.tolist()))
        cost = found.cost(x)
        assert (cost - found.constant >= found.forbidden) == bool(truth.forbidden)
        if not truth.forbidden:
            assert cost == pytest.approx(truth.objective, abs=1e-9)
        assert (found.profile(x) <= found.room).all() == (not truth.violations)


@MANY
@given(problem=problems, seed=st.integers(0, 99))
def test_bounds_hold_at_any_prices(problem: Problem, seed: int) -> None:
    found, rng = known(problem), np.random.default_rng(seed)
    messages, truth, last = Messages(found), least(problem), -math.inf
    prices = rng.random(len(found.room)) * rng.integers(0, 3)
    for _ in range(8):
        messages.turn(found.priced(prices))
        bound = messages.bound - float(prices @ found.room)
        assert last - 1e-9 <= bound <= truth + 1e-9
        last = bound


@MANY
@given(problem=problems, seed=st.integers(0, 99))
def test_a_sweep_is_the_best_with_what_it_holds(problem: Problem, seed: int) -> None:
    found, rng = known(problem), np.random.default_rng(seed)
    prices = rng.random(len(found.room)) * 3
    start = np.array([int(rng.integers(size)) for size in problem.sizes])
    sweep = EliminationOrder(found, rng, np.ones(len(problem.sizes)), 10)

    def cost(x: np.ndarray) -> float:
        return found.cost(x) + float(prices @ found.profile(x))

    best = sweep.best(found.priced(prices), start)
    same = [x for x in every(problem) if (x[sweep.held] == start[sweep.held]).all()]
    assert (best[sweep.held] == start[sweep.held]).all()
    assert cost(best) == pytest.approx(min(map(cost, same)), rel=1e-9, abs=1e-9)


@MANY
@given(problem=problems, seed=st.integers(0, 99))
def test_local_search_never_beats_the_optimum(problem: Problem, seed: int) -> None:
    search, truth = LocalSearch(known(problem), seed), least(problem)
    for _ in range(ASCENT + 15):
        search.step()
    assert search.bound <= truth + 1e-9
    if search.best is not None:
        found = evaluate(problem, tuple(search.best.tolist()))
        assert found.feasible
        assert found.objective == pytest.approx(search.cost, abs=1e-9)
        assert found.objective >= truth


def test_local_search_finds_most_optima() -> None:
    found = answers = 0
    for seed in range(60):
        problem = pairs(seed, True)
        search = LocalSearch(known(problem), 0)
        for _ in range(ASCENT + 20):
            search.step()
        answers += math.isfinite(least(problem))
        found += search.cost == least(problem) < math.inf
    assert answers > 20
    assert found > 0.9 * answers


@MANY
@given(problem=problems, seed=st.integers(0, 99))
def test_parts_add_up_and_blends_keep_the_rows(problem: Problem, seed: int) -> None:
    found, rng = known(problem), np.random.default_rng(seed)
    base, other = (np.array([int(rng.integers(size)) for size in problem.sizes]) for _ in range(2))
    parts = blend.DifferingParts(found, base, other)
    assert found.cost(base) - parts.gain.sum() == pytest.approx(found.cost(other), rel=1e-9, abs=1e-9)
    more = np.zeros(len(found.room))
    for part in range(parts.count):
        first, last, change = parts.change(part)
        more[first:last] += change
    assert found.profile(base) + more == pytest.approx(found.profile(other))
    if (found.profile(base) <= found.room).all():
        blended = blend.blended(found, base, other, np.zeros(len(found.room)))
        assert (found.profile(blended) <= found.room + 1e-9).all()
        assert ((blended == base) | (blended == other)).all()


@settings(MANY, max_examples=25)
@given(problem=problems)
def test_large_problems_are_proven_with_local_search_beside_highs(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lagrangian, "VARIABLES", 0)
        patch.setattr(solving, "MANY_CELLS", -1)
        answer, truth = solve(problem), least(problem)
        assert answer.status is (Status.OPTIMAL if math.isfinite(truth) else Status.INFEASIBLE)
        assert answer.objective == pytest.approx(truth, rel=1e-6)


def without_forbidden(seed: int) -> Problem:
    """Taking everybody's least use is an answer."""
    data = contest_instance(seed, 300)
    edges = data["problem"]["edges"]  # type: ignore[index]
    edges["costs"] = [[0 if cost >= 10**18 else cost for cost in costs] for costs in edges["costs"]]
    return contest_problem(data)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.one_in(2)
def test_there_is_an_answer_whatever_the_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solving, "MOST_CELLS", 0)
    problem = without_forbidden(seed)
    first = solve(problem, time_limit=1e-6)
    heard: list[tuple[float, float]] = []
    later = solve(problem, time_limit=1.5, on_progress=lambda best, bound: heard.append((best, bound)))
    for answer in (first, later):
        assert answer.status is Status.FEASIBLE
        assert answer.choices is not None
        assert evaluate(problem, answer.choices).objective == answer.objective
        assert answer.bound <= later.objective
        assert answer.bound > 0
    assert later.solver == "local search"
    assert later.objective < first.objective
    assert later.bound > first.bound
    assert min(best for best, _ in heard) == later.objective


def test_a_partner_finds_answers_and_takes_those_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('of the current folder')\n")
    monkeypatch.chdir(tmp_path)
    problem = without_forbidden(0)
    found, rng = known(problem), np.random.default_rng(0)
    again = pickle.loads(pickle.dumps(found))
    x = np.array([int(rng.integers(size)) for size in problem.sizes])
    assert again.cost(x) == found.cost(x)
    threads = set(threading.enumerate())
    partner = OtherProcess(PARTNER, (found, 1))
    try:
        answers: list[np.ndarray] = []
        end = time.monotonic() + 60
        while len(answers) < 2 and time.monotonic() < end:
            while partner.news:
                choices, _ = partner.news.popleft()
                if choices is not None:
                    answers.append(choices)
                    partner.tell(choices)
            time.sleep(0.01)
        costs = [evaluate(problem, tuple(choices.tolist())) for choices in answers]
        assert all(cost.feasible for cost in costs)
        assert costs[0].objective > costs[1].objective
    finally:
        partner.end()
    assert set(threading.enumerate()) == threads


def test_a_table_of_a_million_cells_is_read_as_it_is() -> None:
    rng = np.random.default_rng(0)
    costs = rng.integers(0, 10**6, (1040, 1030)) + 0.0
    entries = tuple(RowTerm((i,), np.arange(size, dtype=float)) for i, size in enumerate(costs.shape))
    rows = (ResourceRow("memory", 900.0, entries),)
    problem = Problem(
        "dense", (ChoiceVariable("a", 1040), ChoiceVariable("b", 1030)), (Term((0, 1), costs),), rows
    )
    total = np.add.outer(np.arange(1040), np.arange(1030))
    truth = costs[total <= 900].min()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lagrangian, "VARIABLES", 0)
        answer = solve(problem, time_limit=3)
    assert answer.bound <= truth <= answer.objective
