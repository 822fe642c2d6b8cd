"""The answer is the best of all layouts, tried one by one by the evaluator; both solvers find it."""

from __future__ import annotations

import math
import random

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt import search
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.subproblem import SubproblemSearch
from layoutopt.solver import Status, solve
from layoutopt.space.decisions import SearchSpace
from tests.layoutopt.models import (
    EXAMPLES,
    HARDWARE,
    Question,
    all_points,
    random_model,
    random_question,
)
from tests.marks import by_day

AGREE = 1e-9


def check(seed: int, most: int) -> str:
    """One random model, question and memory limit; returns the answer's status."""
    model, rng = random_model(seed), random.Random(seed)
    question, hardware = random_question(model, seed, most), load_hardware(HARDWARE[seed % len(HARDWARE)])
    points = all_points(model, question, hardware)
    peaks = sorted({p.peak for p in points})
    some = [rng.choice(peaks) for _ in range(3)] if peaks else []
    memory = rng.choice([math.inf, *some, *(p for p in (*peaks[:1], *(p - 1 for p in peaks[:1])))])
    times = [p.seconds for p in points if p.peak <= memory]
    where = f"seed {seed}: {question}, {hardware.name}, {memory} bytes"

    def answer() -> tuple[float, str]:
        plan = search(
            model,
            mesh=question.mesh,
            hardware=hardware,
            memory=memory,
            storage=question.storage,
            recompute=question.recompute,
            microbatches=question.microbatches,
            pins=question.pins,
        )
        for each in plan.alternatives:
            here = dict(each.mesh) == dict(question.mesh.axes)  # a rival by name may stand on its own mesh
            if each.feasible and each.predicted and here and allowed(question, each.storage, each.recompute):
                assert each.predicted.step_seconds >= plan.predicted.step_seconds * (1 - AGREE), where
        assert plan.predicted.peak_memory_bytes <= memory, where
        return plan.predicted.step_seconds, plan.solver.status

    if not times:
        with pytest.raises(mtf.InfeasibleError, match="no layout of"):
            answer()
        return "INFEASIBLE"
    seconds, status = answer()
    assert seconds == pytest.approx(min(times), rel=AGREE), where
    assert status == "OPTIMAL", where
    return status


def allowed(question: Question, storage: dict[str, str], recompute: list[str]) -> bool:
    """Whether an alternative is among what the search could choose (the pins forbid most)."""
    free = not question.pins and 1 in question.microbatches and False in question.recompute
    return free and not recompute and {*storage.values(), "layout"} <= set(question.storage)


@pytest.mark.parametrize("seed", by_day(range(24), every=8))
@pytest.mark.one_in(4)
def test_random_models(seed: int) -> None:
    check(seed, 40)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(24, 224, 20))
def test_many_random_models(first: int) -> None:
    found = {check(seed, 60) for seed in range(first, first + 20)}
    assert found == {"OPTIMAL", "INFEASIBLE"}


LARGE = [name for name in EXAMPLES if "former" in name]
"""Both solvers need most of a minute for them, without reductions."""


def test_both_solvers_agree() -> None:
    solvers_agree("mlp", "data:2;model:2", 1)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    by_day([n for n in EXAMPLES if n not in LARGE], every=6, first=1)
    + [pytest.param(n, marks=pytest.mark.nightly) for n in LARGE],
)
def test_both_solvers_agree_on_every_example(name: str) -> None:
    solvers_agree(name, "data:2;model:2", 2)


def solvers_agree(name: str, mesh_text: str, parts: int) -> None:
    from layoutopt.space.decisions import decisions

    model, mesh, hardware = EXAMPLES[name](), mtf.Mesh(mesh_text), load_hardware("tpu-v3")
    graph = model.training_step(parts).graph
    decided = decisions(graph, mesh, SearchSpace(microbatches=(parts,)))
    search = SubproblemSearch.whole(Evaluator(model, hardware), mesh, decided)
    problem = search.limited(math.inf)
    free = solve(problem, solver="cp-sat")
    assert free.choices is not None
    used = max(row.use(free.choices) for row in problem.rows)
    tight = search.limited(0.7 * used)
    for asked, first in ((problem, free), (tight, solve(tight, solver="cp-sat"))):
        second = solve(asked, solver="highs")
        assert first.status is second.status is Status.OPTIMAL
        assert first.objective == pytest.approx(second.objective, rel=2e-6)
