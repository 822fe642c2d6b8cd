"""Every kind of decision at once: the search's answer is the best of all layouts, tried one by one."""

from __future__ import annotations

import math
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt.formulation.extract import Draft
from layoutopt.optimize.driver.search import LayoutSearch
from layoutopt.optimize.evaluation.evaluator import Evaluator, TablePrices
from layoutopt.optimize.heuristics.best_plans import held
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.space.collective_matmul import CollectiveMatmul
from layoutopt.space.decisions import KINDS, SearchSpace, decisions, left_out
from layoutopt.space.kind import Decision, Target
from layoutopt.space.splits import Split
from tests.layoutopt.every_kind import OPENED, Whole, opened, question_of, waits, whole_model, whole_question
from tests.layoutopt.models import EXAMPLES
from tests.marks import by_day
from tests.searching import search

AGREE, PROVEN = 1e-9, 1e-6


def check(seed: int, most: int) -> Counter[str]:
    """A question about one model, mostly under a memory limit that binds; returns what came of it, with which
    kinds were free, and which are in the answer."""
    return checked(question_of(seed, most), seed)


def checked(question: Whole, seed: int) -> Counter[str]:
    """What comes of one question."""
    rng = random.Random(seed)
    points = [(each.cost.step_seconds, each.memory.peak) for each in question.evaluated()]
    peaks = sorted({peak for _, peak in points})
    found = Counter[str](models=1, layouts=len(points))
    if not peaks:
        assert answer(question, math.inf, "time") is None, f"seed {seed}: nothing is legal"
        return found + Counter(illegal=1)
    found.update(f"{kind.__name__} is free" for kind in question.free)
    few = rng.choice(peaks[: 1 + len(peaks) // 3])
    limit = rng.choice([peaks[0], few, few, rng.choice(peaks), peaks[0] - 1, math.inf, None])
    return found + (least_memory(question, peaks[0]) if limit is None else fastest(question, limit, points))


def fastest(question: Whole, limit: float, points: list[tuple[float, int]]) -> Counter[str]:
    """What a search answers that is asked for the least time, beside all layouts."""
    seconds = [s for s, peak in points if peak <= limit]
    where = f"{question.model.name}: {question.mesh}, {question.hardware.name}, {limit} bytes"
    got = answer(question, limit, "time")
    if not seconds:
        assert got is None, where
        return Counter(infeasible=1)
    assert got is not None and got.best is not None, (
        f"{where}: proven that nothing fits, and {len(seconds)} layouts do"
    )
    least, best = min(seconds), got.best
    assert got.bound.value <= least * (1 + AGREE), (
        f"{where}: {got.bound.value} is no bound, {least} is possible"
    )
    assert best.peak <= limit and best.seconds >= least * (1 - AGREE), where
    proven = got.proven and got.bound.value >= best.seconds * (1 - PROVEN)
    assert not proven or best.seconds <= least * (1 + PROVEN), f"{where}: {best.seconds}, not {least}"
    # What loops wait for the host link comes in steps, which are bounds (`host_link`).
    assert proven or waits(best.evaluation), f"{where}: {best.seconds} is not proven, from {got.bound.value}"
    taken = question.taken(best.layout, best.options)
    found = Counter(f"{kind.__name__} is taken" for kind in taken)
    found.update(["optimal" if proven else "waiting for hosts", *["binding"] * (len(seconds) < len(points))])
    return found


def least_memory(question: Whole, least: int) -> Counter[str]:
    got = answer(question, math.inf, "memory")
    assert got is not None and got.best is not None and got.best.peak == least, (
        f"{question.model.name}: the least memory is {least}"
    )
    return Counter({"least memory": 1})


def answer(question: Whole, limit: float, objective: str) -> LayoutSearch | None:
    """A search that is done; None if it is proven that there is no answer."""
    its = LayoutSearch(question.request(limit, objective))
    with suppress(mtf.InfeasibleError):
        its.run(question.problems)
        return its
    return None


@pytest.mark.parametrize("seed", by_day(range(8), every=8, first=2))
def test_an_answer_is_the_best_of_all_layouts(seed: int) -> None:
    check(seed, 24)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 1600, 50))
def test_answers_about_many_models_are_the_best(first: int) -> None:
    found = sum((check(seed, 24) for seed in range(first, first + 50)), Counter[str]())
    assert found["optimal"] > 10 and found["binding"] and found["infeasible"] and found["least memory"]


# -- every kind is looked at --


def test_every_kind_is_free_in_some_question() -> None:
    """Also one that was added today: it has a row in `OPENED`, or no question is made at all."""
    assert OPENED.keys() == {*KINDS}
    assert looked_at() == {*KINDS}


def looked_at() -> set[type[Decision]]:
    """The kinds of which something is left to decide in a few questions."""
    found = set[type[Decision]]()
    for seed in (2, 3, 5, 10, 11):
        if found != {*KINDS}:
            found |= question_of(seed, 96).free
    return found


def test_a_search_that_is_allowed_everything_decides_every_kind() -> None:
    model, mesh, rng = whole_model(3), mtf.Mesh("x:2;y:2;sites:2"), random.Random(3)
    known = set[type[Decision]]()
    for rarely in (False, True):
        for each in subproblems(model, [mesh], opened(rng, model, rarely)):
            known |= set() if each.refused else {type(d) for d in each.decided.every}
    assert known == {*KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(4)
def test_a_kind_that_the_space_forgets_is_found_out(
    kind: type[Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layoutopt.space.decisions.KINDS", tuple(k for k in KINDS if k is not kind))
    with pytest.raises(AssertionError):
        test_a_search_that_is_allowed_everything_decides_every_kind()


def test_a_kind_that_is_not_allowed_is_said() -> None:
    target = Target(whole_model(3), mtf.Mesh("x:2;y:2"))
    asked: dict[str, Any] = {"storage": ("layout",), "recompute": (False,), "microbatches": (1,)}
    ways = SearchSpace(**asked), SearchSpace(**asked, pipeline=("layers",))  # a schedule is one of stages
    assert {left.kind for way in ways for left in left_out(target, way)} == {kind.label for kind in KINDS}


def test_a_kind_without_a_row_has_no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    class New(Split):
        """A kind of today."""

    monkeypatch.setattr("tests.layoutopt.every_kind.KINDS", (*KINDS, New))
    with pytest.raises(KeyError):
        whole_question(0, 24)


# -- what the hunt found --


def test_what_the_hosts_hold_is_not_held_by_devices() -> None:
    """No bound on what variables need counts those that may lie there."""
    model, mesh = EXAMPLES["mlp"](), mtf.Mesh("x:2")
    graph = model.training_step().graph

    def bound(*offload: str) -> float:
        asked = SearchSpace(
            pins=dict.fromkeys(graph.dims(), ()), storage=("layout",), offload=offload, microbatches=(1,)
        )
        return held(model, mesh, decisions(graph, mesh, asked))

    state = sum(v.bytes for v in graph.variables.values() if v.slot_of is not None)
    trained = sum(v.bytes for v in graph.variables.values() if v.trainable)
    assert bound() - bound("optimizer") == pytest.approx(state) and state > 0
    assert bound() - bound("weights") == pytest.approx(trained)


def test_second_runs_move_apart_from_backward_beside_products() -> None:
    """A second run whose products overlap their gathers in chunks gathers for itself; backward, once more."""
    model, mesh = whole_model(60041), mtf.Mesh("x:2;y:2")
    said: dict[str, Any] = {
        "elsewhere": ("length",),
        "recompute": (True,),
        "collective_matmul": ("d",),
        "microbatches": (1,),
    }
    decided = decisions(model.training_step().graph, mesh, SearchSpace(**said))
    layout = mtf.Layout("kv:x;length@elsewhere:x+y")
    evaluator = Evaluator(model, load_hardware("a100"))
    tables = TablePrices(Draft(model, mesh, decided, evaluator.prices(mesh)))
    for products in (frozenset({"d"}), frozenset[str]()):
        options = mtf.Options(recompute={"layers"}, collective_matmul=products)
        seconds = evaluator(mesh, layout, options).cost.step_seconds
        assert tables.seconds(layout, options) == pytest.approx(seconds, rel=AGREE)


def test_replicas_with_stages_are_no_problem_of_a_search() -> None:
    model = EXAMPLES["transformer"]()
    with pytest.raises(mtf.UserError, match="a replica cannot be split into pipeline stages"):
        search(model, mesh="data:3;sites:2", diloco="sites", pipeline=("layers",))


def test_a_kind_may_change_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that every cluster is told of is taken for none about attention's keys."""
    asked: dict[str, Any] = {"mesh": "data:2;model:2", "hardware": "tpu-v4", "microbatches": [1]}
    asked |= {"storage": ["layout"], "collective_matmul": "hidden", "alternatives": False}
    plain = layoutopt.search(EXAMPLES["mlp"](), **asked)
    every = [f"{CollectiveMatmul.prefix}hidden"]
    monkeypatch.setattr(CollectiveMatmul, "changing", classmethod(lambda cls, touched: every))
    told = layoutopt.search(EXAMPLES["mlp"](), **asked)
    assert told.solver.status == plain.solver.status == "OPTIMAL"
    assert told.predicted.step_seconds == pytest.approx(plain.predicted.step_seconds, rel=1e-9)


@pytest.mark.parametrize("interval", ["30us", "13us"])
@pytest.mark.parametrize("objective", ["time", "pareto"])
@pytest.mark.parametrize("seed", by_day([3, 5, 9], every=3, first=1))
@pytest.mark.one_in(4)
def test_the_best_step_is_the_longer_of_host_and_device(seed: int, objective: str, interval: str) -> None:
    """Under eager PyTorch: the answer is best of all layouts by what `cost` says first, and the bound is the
    longer of the least seconds of the host and of the device, unless no layout takes both."""
    machine = load_hardware(f"h100, host_interval={interval}", "torch")
    question = replace(question_of(seed, 24), hardware=machine)
    costs = [(each.cost, each.memory.peak) for each in question.evaluated()]
    times = [(c.device_seconds, c.interval * c.launched) for c, _ in costs]
    assert [c.step_seconds for c, _ in costs] == pytest.approx([*map(max, times)])
    assert interval == "13us" or all(c.host_seconds for c, _ in costs)
    for limit in (math.inf, sorted(peak for _, peak in costs)[len(costs) // 3]):
        fitting = [each for each, (_, peak) in zip(times, costs, strict=True) if peak <= limit]
        best, least = min(map(max, fitting)), max(map(min, zip(*fitting, strict=True)))
        got = answer(replace(question_of(seed, 24), hardware=machine), limit, objective)
        assert got is not None and got.best is not None
        assert got.best.seconds == pytest.approx(best)
        assert least * (1 - 1e-4) <= got.bound.value <= best * (1 + 1e-9)
