"""Least memory, time against memory, and what comes out when there is no time, against enumeration."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples.transformer_lm import model as transformer
from layoutopt import Plan, search
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.least_memory import leanest, least_memory
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import SubproblemOutcome, SubproblemSearch
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.space.decisions import SearchSpace
from tests.layoutopt.models import (
    EXAMPLES,
    HARDWARE,
    SMALL,
    Point,
    Question,
    all_points,
    random_model,
    random_question,
)
from tests.marks import by_day

AGREE = 1e-6
ONE = SearchSpace(microbatches=(1,))


def asked(seed: int, most: int) -> tuple[mtf.Model, Question, str, list[Point]]:
    """A random model and question, and all its points."""
    model = random_model(seed)
    question = random_question(model, seed, most)
    hardware = HARDWARE[seed % len(HARDWARE)]
    return model, question, hardware, all_points(model, question, load_hardware(hardware))


def answer(model: mtf.Model, question: Question, hardware: str, **more: object) -> Plan:
    return search(
        model,
        mesh=question.mesh,
        hardware=hardware,
        storage=question.storage,
        recompute=question.recompute,
        microbatches=question.microbatches,
        pins=question.pins,
        alternatives=False,
        **more,  # type: ignore[arg-type]
    )


def check(seed: int, most: int) -> None:
    model, question, hardware, points = asked(seed, most)
    if not points:
        return
    least = min(p.peak for p in points)
    plan = answer(model, question, hardware, objective="memory", memory=1e30)
    assert (plan.solver.status, plan.solver.bound) == ("OPTIMAL", least)
    fastest = min(p.seconds for p in points if p.peak == least)
    assert plan.predicted.peak_memory_bytes == least
    assert plan.predicted.step_seconds == pytest.approx(fastest, rel=AGREE)
    plan = answer(model, question, hardware, objective="pareto", memory=1e30)
    assert plan.solver.status == "OPTIMAL"
    front = [p.predicted for p in plan.data.frontier or () if p.predicted]
    for p in points:
        assert any(
            f.peak_memory_bytes <= p.peak and f.step_seconds <= p.seconds * (1 + AGREE) for f in front
        ), f"seed {seed}: {p} lies beyond the frontier"
    assert front[-1].peak_memory_bytes == least


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", by_day(range(8), every=4, first=2))
def test_random_models(seed: int) -> None:
    check(seed, 30)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8, 40))
def test_many_random_models(seed: int) -> None:
    check(seed, 60)


@pytest.mark.parametrize("seed", by_day(range(8), every=4))
def test_the_steps_of_memory_enclose_the_least_peak(seed: int) -> None:
    model, question, hardware, _ = asked(seed, 30)
    for decided in question.decided(model):
        one = Question(
            question.mesh, question.storage, question.recompute, (decided.microbatches,), question.pins
        )
        points = all_points(model, one, load_hardware(hardware))
        evaluator = Evaluator(model, load_hardware(hardware))
        found, low = leanest(SubproblemSearch.whole(evaluator, question.mesh, decided))
        assert (found is None) == (not points)
        if found is not None:
            least = min(p.peak for p in points)
            assert low <= least <= found.peak


def test_what_is_not_proven_of_less_memory_is_still_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that is known beforehand does not end the search for a leaner one."""
    monkeypatch.setattr(
        SubproblemSearch, "fastest", lambda self, limit, **_: SubproblemOutcome(None, 0.0, False)
    )
    model, hardware = EXAMPLES["mlp"](), load_hardware("tpu-v3")
    (space, *_) = subproblems(
        model, [mtf.Mesh("x:4")], SearchSpace(storage=("layout",), recompute=(False,), microbatches=(1,))
    )
    found, low = least_memory(space.opened(Evaluator(model, hardware)), below=1e9)
    assert 0 < low <= found[-1].peak < 1e9


def test_without_time_there_is_a_plan_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "late", True)
    model = EXAMPLES["mlp"]()
    for objective, mesh in (("time", "data:2;model:2"), ("memory", "x:4"), ("pareto", "x:4")):
        plan = search(model, mesh=mesh, hardware="tpu-v3", objective=objective, time_limit=1e6)
        assert plan.solver.status == "FEASIBLE"
        priced = [a.predicted.step_seconds for a in plan.alternatives if a.feasible and a.predicted]
        assert objective == "memory" or plan.predicted.step_seconds <= min(priced)


def test_no_time_and_nothing_by_name_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "late", True)
    with pytest.raises(mtf.LimitError, match="no layout was found within the time limit"):
        search(EXAMPLES["mlp"](), mesh="x:4", hardware="tpu-v3", memory=7000, time_limit=1e6)


def test_what_is_said_to_be_needed_is_needed() -> None:
    model, plain = EXAMPLES["mlp"](), {"recompute": (False,), "microbatches": (1, 2)}

    def find(**more: object) -> Plan:
        return search(model, mesh="x:4", hardware="tpu-v3", alternatives=False, **plain, **more)  # type: ignore[arg-type]

    least = find(objective="memory", storage=("layout",)).predicted.peak_memory_bytes
    with pytest.raises(mtf.InfeasibleError, match=r"no layout of 'mlp' .*fits"):
        find(memory=least - 1, storage=("layout",))
    assert find(memory=least, storage=("layout",)).predicted.peak_memory_bytes == least


@pytest.mark.nightly
def test_gradients_that_are_moved_at_the_end_of_an_iteration_are_counted() -> None:
    model = transformer(**{**SMALL, "layers": 2})
    plan = search(
        model,
        mesh="data:2;model:2",
        hardware="tpu-v4",
        objective="memory",
        microbatches=(2,),
        pins="vocab:none;positions:none",
        alternatives=False,
    )
    assert plan.solver.status == "OPTIMAL"
    assert plan.solver.bound == plan.predicted.peak_memory_bytes


def test_a_mesh_that_holds_more_at_best_is_proven_so_by_what_another_holds() -> None:
    evaluator = Evaluator(EXAMPLES["mlp"](), load_hardware("tpu-v3"))
    few, many = (
        next(subproblems(evaluator.model, [mtf.Mesh(mesh)], ONE)).opened(evaluator)
        for mesh in ("data:2", "data:8")
    )
    best, low = leanest(many)
    assert best is not None
    assert 0 < low <= best.peak
    assert leanest(few, best=best) == (best, best.peak)
    other, _ = leanest(few)
    assert other is not None
    assert other.peak > best.peak
    assert leanest(many, best=other)[0] != other
