"""Ctrl-C in the middle of a search: the best so far is kept, and not called proven."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

import layoutopt.optimize.driver.fastest as places
from layoutopt import search, solver
from layoutopt.optimize.answers.planning import make_plan
from layoutopt.solver import Problem, Solution, solve
from tests.layoutopt.models import EXAMPLES

ON: dict[str, Any] = {"mesh": "data:2;model:2", "hardware": "tpu-v3", "microbatches": (1,)}


def ctrl_c(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.one_in(2)
@pytest.mark.parametrize("objective", ["time", "memory", "pareto"])
def test_the_best_so_far_is_kept(objective: str) -> None:
    said = itertools.count()
    plan = search(
        EXAMPLES["mlp"](),
        objective=objective,
        keep_best=True,
        on_better=lambda *_: None if next(said) else ctrl_c(),
        **ON,
    )
    assert plan.solver.status == "FEASIBLE"
    assert plan.solver.bound <= plan.solver.objective
    priced = [a.predicted.step_seconds for a in plan.alternatives if a.predicted and "(" not in a.name]
    assert objective == "memory" or plan.predicted.step_seconds <= min(priced)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("objective", ["time", "memory", "pareto"])
def test_ctrl_c_again_keeps_the_best_so_far_too(objective: str) -> None:
    told: list[tuple[float, int]] = []

    def again(words: str, seconds: float, peak: int) -> None:
        told.append((seconds, peak))
        raise KeyboardInterrupt

    plan = search(EXAMPLES["mlp"](), objective=objective, keep_best=True, on_better=again, **ON)
    assert plan.stopped and plan.solver.status == "FEASIBLE"
    assert (plan.predicted.step_seconds, plan.predicted.peak_memory_bytes) == told[-1]


def test_ctrl_c_while_a_stopped_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def made(*asked: Any, **more: Any) -> Any:
        return make_plan(*asked, **more) if next(calls) else ctrl_c()

    monkeypatch.setattr("layoutopt.optimize.entry.make_plan", made)
    plan = search(EXAMPLES["mlp"](), keep_best=True, on_better=ctrl_c, **ON)
    assert plan.stopped and next(calls) == 2


def test_what_the_solver_had_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, on = EXAMPLES["mlp"](), {**ON, "alternatives": False}
    limit = 0.9 * search(model, **on).predicted.peak_memory_bytes
    best = search(model, memory=limit, **on)

    def stopped(problem: Problem, **asked: Any) -> Solution:
        return replace(solve(problem, **asked), stopped=True)

    monkeypatch.setattr(solver, "solve", stopped)
    kept = search(model, memory=limit, keep_best=True, **on)
    assert kept.solver.status == "FEASIBLE"
    assert kept.predicted.peak_memory_bytes <= limit
    assert kept.predicted.step_seconds >= best.predicted.step_seconds


def test_every_better_layout_is_told() -> None:
    told: list[tuple[str, float, int]] = []
    plan = search(EXAMPLES["mlp"](), on_better=lambda *found: told.append(found), **ON)
    words, seconds, peak = told[-1]
    assert words.startswith(f"{plan.layout} on data:2;model:2")
    assert (seconds, peak) == (plan.predicted.step_seconds, plan.predicted.peak_memory_bytes)
    assert [s for _, s, _ in told] == sorted((s for _, s, _ in told), reverse=True)


def test_ctrl_c_is_raised_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "faster", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        search(EXAMPLES["mlp"](), **ON)
    with pytest.raises(KeyboardInterrupt):
        search(EXAMPLES["mlp"](), memory=8000, keep_best=True, **ON)  # its variables alone would fit


def test_layouts_on_the_way_have_the_axes_of_the_plan() -> None:
    told: list[tuple[str, float, float]] = []
    given = {"devices": 4, "hardware": ON["hardware"]}
    plan = search(EXAMPLES["transformer"](), on_better=lambda *found: told.append(found), **given)
    words, seconds, _ = told[-1]
    assert seconds == plan.predicted.step_seconds
    assert f"{plan.layout or 'nothing split'} on {plan.mesh}" in words
