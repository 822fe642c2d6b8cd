"""A time limit ends a search wherever it is, with the best layout so far and a bound that is true."""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from costmodels.hardware import load_hardware
from layoutopt import search
from layoutopt.optimize.driver.fastest import FastestSearch
from layoutopt.optimize.entry import SearchStatus
from layoutopt.optimize.evaluation.evaluation import ONE_DEVICE as ONE
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.optimize.problems.subproblems import Subproblem, possible
from layoutopt.plan.build import Plan
from layoutopt.solver import TOLERANCE, Status, solve
from mesh_tf_core.errors import InfeasibleError, LimitError
from mesh_tf_core.ir.layout import Layout
from tests.layoutopt.models import EXAMPLES
from tests.marks import by_day
from tests.solver.test_solvers import knapsacks

ON: dict[str, Any] = {"mesh": "data:2;model:2", "hardware": "tpu-v3", "microbatches": (1, 2)}
PLAIN: dict[str, Any] = {"storage": ("layout",), "recompute": (False,)}
SOON = 0.4


def stuck() -> None:
    while True:
        time.sleep(0.005)


def stick(monkeypatch: pytest.MonkeyPatch, place: str, after: int = 0) -> None:
    """Lets a function ("module:name") not come back, but for its first calls."""
    module, names = place.split(":")
    *owners, name = names.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    calls, known = itertools.count(), getattr(owner, name)

    def called(*given: Any, **named: Any) -> Any:
        if next(calls) >= after:
            stuck()
        return known(*given, **named)

    monkeypatch.setattr(owner, name, called)


@pytest.fixture(scope="module")
def best() -> Plan:
    return search(EXAMPLES["mlp"](), **ON)


def check(plan: Plan, best: Plan) -> None:
    """A plan claims nothing that the proven best contradicts."""
    price = evaluate(EXAMPLES["mlp"](), plan.mesh, plan.layout, load_hardware("tpu-v3"), plan.options).cost
    seconds, found = best.predicted.step_seconds, plan.solver
    assert best.solver.status == "OPTIMAL"
    assert plan.predicted.step_seconds == pytest.approx(price.step_seconds)
    assert found.bound is not None and found.gap is not None
    assert 0 <= found.bound <= seconds * (1 + TOLERANCE)
    assert found.gap == pytest.approx(1 - found.bound / plan.predicted.step_seconds, abs=TOLERANCE)
    assert (found.status == "OPTIMAL") == (found.gap <= TOLERANCE)


@pytest.mark.parametrize(
    ("place", "after"),
    [
        ("layoutopt.formulation.tables:Tabler.table", 0),
        ("layoutopt.formulation.tables:Tabler.table", 40),
        ("layoutopt.optimize.evaluation.evaluator:evaluate", 6),
        ("layoutopt.optimize.proof.fixing:eliminate", 0),
        ("layoutopt.optimize.evaluation.evaluator:TablePrices.seconds", 0),
        ("layoutopt.optimize.answers.alternatives:BestPlans.of", 1),
    ],
)
@pytest.mark.one_in(3)
def test_the_best_so_far_is_the_answer(
    place: str, after: int, best: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = EXAMPLES["mlp"]()
    stick(monkeypatch, place, after)
    check(search(model, time_limit=SOON, **ON), best)


def test_a_share_of_the_work_is_a_bound_without_more_time(
    best: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    stick(monkeypatch, "layoutopt.optimize.answers.planning:_Proof.look")
    plan = search(EXAMPLES["mlp"](), time_limit=2.0, **ON)
    assert plan.solver.status == "FEASIBLE"
    alone = evaluate(EXAMPLES["mlp"](), ONE, Layout(), load_hardware("tpu-v3")).cost.compute_seconds
    check(plan, best)
    assert plan.solver.bound == pytest.approx(alone / 4)


def test_what_is_not_listed_yet_is_not_proven(best: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def first(*asked: Any) -> Iterator[Subproblem]:
        yield next(possible(*asked))
        stuck()

    monkeypatch.setattr("layoutopt.optimize.entry.possible", first)
    plan = search(EXAMPLES["mlp"](), time_limit=SOON, **ON)
    check(plan, best)
    assert plan.solver.status == "FEASIBLE"


def test_a_limit_that_is_over_at_once_leaves_time_for_any_answer(best: Plan) -> None:
    check(search(EXAMPLES["mlp"](), time_limit=1e-6, **ON), best)


def test_what_fits_most_likely_is_priced_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stick(monkeypatch, "layoutopt.optimize.evaluation.evaluator:evaluate", 1)
    plan = search(EXAMPLES["mlp"](), time_limit=SOON, **ON)
    assert plan.layout.axes("batch")


@pytest.mark.parametrize("objective", by_day(["pareto", "memory"]))
def test_other_objectives(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(EXAMPLES["mlp"](), objective=objective, **ON, **PLAIN)
    stick(monkeypatch, "layoutopt.solver:solve", 2)
    plan = search(EXAMPLES["mlp"](), objective=objective, time_limit=SOON, **ON, **PLAIN)
    assert plan.solver.status == "FEASIBLE" and plan.solver.bound is not None
    assert plan.solver.bound <= (whole.solver.objective or 0) * (1 + TOLERANCE)
    if objective == "pareto":
        told = [(p.predicted.step_seconds, p.predicted.peak_memory_bytes) for p in whole.data.frontier or ()]
        for point in plan.data.frontier or ():
            assert point.predicted is not None
            own = point.predicted.step_seconds, point.predicted.peak_memory_bytes
            assert any(t <= own[0] * (1 + 1e-6) and b <= own[1] for t, b in told)


def test_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layoutopt.optimize.driver.search.ANSWERED", 0.1)
    stick(monkeypatch, "layoutopt.optimize.evaluation.evaluator:evaluate")
    with pytest.raises(LimitError, match="raise time_limit"):
        search(EXAMPLES["mlp"](), time_limit=SOON, **ON)


def test_what_is_proven_needs_no_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layoutopt.optimize.driver.search.LayoutSearch.fastest", lambda *_: None)  # proven
    stick(monkeypatch, "layoutopt.optimize.driver.search:leanest")
    with pytest.raises(InfeasibleError, match=r"no layout of .* fits into 100 B per device"):
        search(EXAMPLES["mlp"](), memory=100, time_limit=SOON, **ON)


@pytest.mark.parametrize(
    ("solver", "place"),
    [
        ("auto", "layoutopt.solver.run:price"),
        ("cp-sat", "layoutopt.solver.run:reduce"),
        ("highs", "layoutopt.solver.lazy:linearise"),
    ],
)
def test_problems_have_an_answer_too(solver: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stick(monkeypatch, place)
    answer = solve(knapsacks(), solver, time_limit=SOON)
    assert answer.status is Status.FEASIBLE
    assert answer.bound < answer.objective


def test_what_was_not_searched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastestSearch, "_fixed", lambda *_: None)
    monkeypatch.setattr(FastestSearch, "look_at_stages", lambda *_: None)
    plan = search(EXAMPLES["mlp"](), **{**ON, **PLAIN, "mesh": None, "devices": 4}, time_limit=60.0)
    assert plan.solver.status == "FEASIBLE"
    said = "of 4 combinations of mesh, microbatches and stages were bounded but not searched"
    assert any(said in note for note in plan.data.notes)


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_progress_is_that_of_the_whole_search(objective: str) -> None:
    told: list[SearchStatus] = []
    asked = {**ON, **PLAIN, "mesh": None, "devices": 4}
    plan = search(EXAMPLES["mlp"](), objective=objective, on_progress=told.append, **asked)
    value = plan.solver.objective
    assert value is not None and told
    bests = [now.best for now in told]
    assert bests == sorted(bests, reverse=True) and bests[-1] >= value * (1 - TOLERANCE)
    for now in told:
        assert now.bound <= value * (1 + TOLERANCE)
        assert 1 <= now.number <= now.count == 4
    bounds = [now.bound for now in told]
    assert objective == "memory" or bounds == sorted(bounds)  # what is proven stays
    looked = [now.looked.removesuffix(", 2 microbatches") for now in told]
    after = looked.index("the plan and its alternatives")
    assert {*looked[:after]} == {"mesh 4", "mesh 2x2"}
    if objective == "time":  # what is done after the proof is told, too
        assert {"alternatives: data parallel", "alternatives: greedy"} <= {*looked[after:]}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(24))
def test_random_limits(seed: int) -> None:
    """Nothing that a search says early is contradicted by what it proves in the end."""
    rng = random.Random(seed)
    model = EXAMPLES[rng.choice(sorted(EXAMPLES))]()
    asked: dict[str, Any] = {
        "hardware": rng.choice(("tpu-v3", "tpu-v4", "h100")),
        "objective": rng.choice(("time", "memory", "pareto")),
        "top": rng.choice((1, 3)),
        **rng.choice(({"mesh": "data:2;model:4"}, {"devices": 8}, {"devices": 12, "max_axes": 3})),
    }
    whole = search(model, **asked).solver
    assert whole.objective is not None and whole.bound is not None
    for limit in (0.01, 0.1, rng.uniform(0.1, 1), rng.uniform(0.5, 3)):
        try:
            found = search(model, time_limit=limit, **asked).solver
        except LimitError:
            continue
        assert found.objective is not None and found.bound is not None
        assert found.bound <= whole.objective * (1 + TOLERANCE)
        assert found.objective >= whole.bound * (1 - TOLERANCE)
        if found.status == "OPTIMAL":
            assert found.objective == pytest.approx(whole.objective, rel=TOLERANCE)


@pytest.mark.parametrize(("memory", "error"), [(2_000, InfeasibleError), (6_000, LimitError)])
def test_what_variables_alone_are_too_large_for_does_not_fit(
    memory: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However early the search ends; the error names the need. Else nothing is known without an answer."""
    stick(monkeypatch, "layoutopt.optimize.driver.search:LayoutSearch.fastest")
    said = (
        r"least memory needs .* \(no layout needs less than"
        if error is InfeasibleError
        else "may or may not fit"
    )
    with pytest.raises(error, match=said):
        search(EXAMPLES["mlp"](), **ON, **PLAIN, memory=memory, time_limit=SOON)
