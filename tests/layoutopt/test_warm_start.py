"""A search has an answer from the first moment if a layout fits that it was told of, or that an expert would
write: with stages and microbatches, under every schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import machine_of
from examples.mlp import model as mlp
from examples.moe_lm import model as mixture
from examples.transformer_lm import model as transformer
from layoutopt import SearchSpace, search
from layoutopt.optimize.entry import SearchStatus
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.heuristics.incumbents import EARLIER, PINS, FirstLayout, Incumbents, named
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.plan.build import Plan
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.schedules import ONE_WAY

HARDWARE = "tpu-v3"
NO_TIME = 1e-9
TINY = {"d_model": 16, "heads": 2, "d_kv": 8, "d_ff": 32, "vocab": 32, "batch": 8, "length": 8}
MODELS: dict[str, Callable[[], mtf.Model]] = {
    "mlp": lambda: mlp(batch=8, hidden=16, layers=2),
    "experts": lambda: mixture(**TINY, layers=2, experts=4),
    "stages": lambda: transformer(**TINY, layers=4),
}
WAYS: list[Any] = [
    ("mlp", {}),
    *(
        pytest.param(name, asked, marks=pytest.mark.nightly)
        for name, asked in [
            ("experts", {}),
            *(
                ("stages", {"pipeline": "layers", "pins": "layers:a", "schedule": (schedule,)})
                for schedule in ONE_WAY
            ),
        ]
    ),
]
"""A model, and what may be chosen; the longer hunts run nightly."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is left from the first moment; what is looked for without time ends whenever it does."""
    monkeypatch.setattr("layoutopt.optimize.driver.search.ANSWERED", 1e6)


def candidates(model: mtf.Model, mesh: mtf.Mesh, space: SearchSpace) -> Iterator[tuple[FirstLayout, int]]:
    """Every layout by name that is legal in some problem, and its peak."""
    evaluator = Evaluator(model, machine_of(HARDWARE))
    for subproblem in (each for each in subproblems(model, [mesh], space) if not each.refused):
        for lean in (False, True):
            for each in named(model, subproblem, lean):
                choices = subproblem.decided.write(each.layout, each.options)
                if all(choice in subproblem.decided.options[name] for name, choice in choices.items()):
                    try:
                        yield each, evaluator(mesh, each.layout, each.options).memory.peak
                    except LayoutError:
                        continue


@pytest.mark.parametrize(("name", "asked"), WAYS)
def test_without_time_there_is_a_layout_where_one_by_name_fits(name: str, asked: dict[str, Any]) -> None:
    model, mesh = MODELS[name](), mtf.Mesh("a:2;b:2")
    space = SearchSpace(**asked, microbatches=(4,), recompute=(True,))
    least: dict[str, int] = {}
    staged = set()
    for each, peak in candidates(model, mesh, space):
        least[each.origin] = min(least.get(each.origin, peak), peak)
        staged |= {*model.stages(mesh, each.layout)}
    assert len(least) >= 6 and staged == {*space.pipeline}
    for origin, peak in least.items():
        plan = search(
            model,
            mesh=mesh,
            hardware=HARDWARE,
            space=space,
            memory=peak,
            time_limit=NO_TIME,
            alternatives=False,
        )
        assert plan.predicted.peak_memory_bytes <= peak, origin
        _honest(plan)


def _honest(plan: Plan) -> None:
    """It is no optimum, its bound is one, and it says where it comes from."""
    found = plan.solver
    assert found.status == "FEASIBLE" and found.bound is not None
    assert 0 < found.bound < plan.predicted.step_seconds
    assert found.gap == pytest.approx(1 - found.bound / plan.predicted.step_seconds)
    assert any("than the one it began with: " in note for note in plan.data.notes)


@pytest.mark.nightly
def test_the_best_layout_is_predicted_in_other_graphs_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules and recomputed parts of stages make graphs: splits good in one mostly are in others."""
    seen: list[tuple[EvaluatedLayout | None, list[EvaluatedLayout]]] = []
    spread = Incumbents.spread

    def told(self: Incumbents, limit: float, *rest: Any) -> None:
        known, before = self.fastest(limit), len(self.found)
        spread(self, limit, *rest)
        seen.append((known, self.found[before:]))

    monkeypatch.setattr(Incumbents, "spread", told)
    asked: dict[str, Any] = {"schedule": ("gpipe", "1f1b"), "recompute": (False, "selective", True)}
    space = SearchSpace(pipeline=("layers",), pins="layers:a", microbatches=(4,), **asked)
    search(MODELS["stages"](), mesh="a:2;b:2", hardware=HARDWARE, space=space, time_limit=60.0)
    known, after = seen[0]
    assert known is not None and known.layout.axes("layers") == ("a",)
    assert len(after) >= 3 and {f.layout for f in after} == {known.layout}
    ways = {(f.options.schedule, f.options.recompute) for f in after}
    assert len(ways) == len(after) and (known.options.schedule, known.options.recompute) not in ways


def test_it_is_predicted_before_subproblems_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the listing can be ended: by Ctrl-C here."""
    said: list[str] = []

    def listed(*_: Any) -> Iterator[Any]:
        said.append("listed")
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("layoutopt.optimize.entry.possible", listed)
    asked = {"pipeline": "layers", "schedule": "1f1b", "hardware": HARDWARE, "microbatches": (2,)}
    plan = search(
        MODELS["stages"](),
        devices=4,
        time_limit=1e6,
        keep_best=True,
        on_better=lambda words, *_: said.append(words),
        **asked,
    )
    assert said[-1] == "listed" and len(said) > 1
    _honest(plan)


def test_the_pins_alone_are_predicted() -> None:
    """What a user would run is in the space, and no named strategy fits."""
    pins = "layers:c;batch:a;heads:b;d_ff:b;vocab:b"
    asked: dict[str, Any] = {"mesh": "a:2;b:2;c:2", "hardware": HARDWARE, "pipeline": "layers"}
    asked |= {"schedule": "1f1b", "microbatches": (2,), "pins": pins}
    plan = search(MODELS["stages"](), time_limit=NO_TIME, **asked)
    assert PINS in str(plan.data.notes)
    assert plan.layout.axes("layers") == ("c",) and plan.layout.axes("heads") == ("b",)


def test_an_earlier_plan_is_predicted_first() -> None:
    """On a mesh whose axes have other names; nothing else fits without time."""
    asked: dict[str, Any] = {"hardware": HARDWARE, "microbatches": (1, 2)}
    first = search(MODELS["mlp"](), mesh="x:2;y:2", objective="memory", alternatives=False, **asked)
    limit = first.predicted.peak_memory_bytes
    with pytest.raises(mtf.LimitError):
        search(MODELS["mlp"](), mesh="a:2;b:2", memory=limit, time_limit=NO_TIME, **asked)
    plan = search(MODELS["mlp"](), mesh="a:2;b:2", memory=limit, time_limit=NO_TIME, start=first, **asked)
    assert plan.layout == first.layout.renamed({"x": "a", "y": "b"})
    assert plan.predicted.peak_memory_bytes == limit and EARLIER in str(plan.data.notes)
    with pytest.raises(mtf.UserError, match="start is 3; pass a Plan"):
        search(MODELS["mlp"](), mesh="a:2;b:2", start=3, **asked)


def test_progress_moves_before_a_problem_is_looked_at() -> None:
    told: list[SearchStatus] = []
    search(
        MODELS["mlp"](), mesh="a:2;b:2", hardware=HARDWARE, microbatches=(1, 2), time_limit=NO_TIME,
        on_progress=told.append,
    )  # fmt: skip
    assert told[0].looked == "named strategies" and math.isinf(told[0].best)
    assert len(set(map(str, told))) == len(told)
