"""Every kind of decision at once: the search's answer is the best of all layouts, tried one by one."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

import mesh_tf_core as mtf
from costmodels.pricing.items import HOST
from layoutopt.evaluator import Evaluation
from layoutopt.optimize.restricted import held
from layoutopt.optimize.search import Search
from layoutopt.space.context import Context
from layoutopt.space.decisions import KINDS, decisions
from layoutopt.space.kind import Allowed, Decision
from layoutopt.space.splits import Split
from tests.layoutopt.every_kind import OPENED, RARE, Whole, whole_question
from tests.layoutopt.models import EXAMPLES
from tests.marks import by_day
from tests.searching import search

AGREE, PROVEN = 1e-9, 1e-6


def check(seed: int, most: int) -> Counter[str]:
    """One model and question, under memory limits that bind and that do not, for the least time and the least
    memory; returns what came of it."""
    question, rng = whole_question(seed, most, rarely=seed % RARE == RARE - 1), random.Random(seed)
    points = [(each.cost.step_seconds, each.memory.peak) for each in question.evaluated()]
    peaks = sorted({peak for _, peak in points})
    found = Counter[str](models=1, layouts=len(points))
    if not peaks:
        assert answer(question, math.inf, "time") is None, f"seed {seed}: nothing is legal"
        return found + Counter(illegal=1)
    limits = [
        math.inf,
        peaks[0],
        rng.choice([peaks[0] - 1, *peaks]),
        rng.choice(peaks[: 1 + len(peaks) // 3]),
    ]
    for limit in dict.fromkeys(map(float, limits)):
        seconds = [s for s, peak in points if peak <= limit]
        where = f"seed {seed}: {question.mesh}, {question.hardware.name}, {limit} bytes"
        got = answer(question, limit, "time")
        if not seconds:
            assert got is None, where
            found["infeasible"] += 1
            continue
        assert got is not None, f"{where}: proven that nothing fits, and {len(seconds)} layouts do"
        least, best = min(seconds), got.best
        assert got.bound <= least * (1 + AGREE), f"{where}: {got.bound} is no bound, {least} is possible"
        assert best.peak <= limit and best.seconds >= least * (1 - AGREE), where
        proven = got.proven and got.bound >= best.seconds * (1 - PROVEN)
        assert not proven or best.seconds <= least * (1 + PROVEN), f"{where}: {best.seconds}, not {least}"
        # What loops wait for the host link comes in steps, which are bounds (`host_link`).
        assert proven or waits(best.evaluation), f"{where}: {best.seconds} is not proven, from {got.bound}"
        found["optimal" if proven else "waiting for hosts"] += 1
    if rng.random() < 0.5:
        got = answer(question, math.inf, "memory")
        assert got is not None and got.best.peak == peaks[0], f"seed {seed}: the least memory is {peaks[0]}"
        found["least memory"] += 1
    return found


def waits(evaluation: Evaluation) -> bool:
    """Whether a step waits for the host link beside loops."""
    return any(x.exposed for x in evaluation.cost.lines if x.axes == (HOST,))


def answer(question: Whole, limit: float, objective: str) -> Search | None:
    """A search that is done; None if it is proven that there is no answer."""
    its = Search(question.request(limit, objective))
    try:
        its.run(question.problems)
    except mtf.InfeasibleError:
        return None
    return its


@pytest.mark.parametrize("seed", by_day(range(8), every=4, first=2))
def test_an_answer_is_the_best_of_all_layouts(seed: int) -> None:
    check(seed, 24)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 1600, 50))
def test_answers_about_many_models_are_the_best(first: int) -> None:
    found = sum((check(seed, 24) for seed in range(first, first + 50)), Counter[str]())
    assert found["optimal"] > 50 and found["infeasible"] and found["least memory"]


# -- every kind is looked at --


def test_every_kind_is_free_in_some_question() -> None:
    """Also one that was added today: it has a row in `OPENED`, or no question is made at all."""
    assert OPENED.keys() == {*KINDS}
    assert looked_at() == {*KINDS}


def looked_at() -> set[type[Decision]]:
    """The kinds of which something is left to decide in a few questions."""
    seeds = (2, 3, 5, 10, 11)
    return {k for seed in seeds for k in whole_question(seed, 96, seed % RARE == RARE - 1).free}


@pytest.mark.parametrize("kind", [Context])
def test_a_kind_that_the_space_forgets_is_found_out(
    kind: type[Decision], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layoutopt.space.decisions.KINDS", tuple(k for k in KINDS if k is not kind))
    with pytest.raises(AssertionError):
        test_every_kind_is_free_in_some_question()


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
        asked = Allowed(dict.fromkeys(graph.dims(), ()), storage=("layout",), offload=offload)
        return held(model, mesh, decisions(graph, mesh, asked))

    state = sum(v.bytes for v in graph.variables.values() if v.slot_of is not None)
    trained = sum(v.bytes for v in graph.variables.values() if v.trainable)
    assert bound() - bound("optimizer") == pytest.approx(state) and state > 0
    assert bound() - bound("weights") == pytest.approx(trained)


def test_replicas_with_stages_are_no_problem_of_a_search() -> None:
    model = EXAMPLES["transformer"]()
    with pytest.raises(mtf.UserError, match=r"replicas along an axis .* have no stages"):
        search(model, mesh="data:3;sites:2", diloco="sites", pipeline=("layers",))
