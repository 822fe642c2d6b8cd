"""Recipes of pipelines beyond the meshes, rounds and microbatches that a search lists."""

from __future__ import annotations

import math
from typing import Any

import pytest

import layoutopt
from layoutopt.optimize.evaluation import Evaluation
from layoutopt.optimize.evaluator import evaluate
from layoutopt.optimize.incumbents import Incumbents, WarmStart, covers
from layoutopt.optimize.probes import Probes
from layoutopt.optimize.question import Limits, SearchQuestion
from layoutopt.optimize.request import Request
from layoutopt.runtime.clock import UNLIMITED
from layoutopt.space import allow
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.mesh_shapes import other_meshes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

LIMIT = 2.4e9
"""Bytes that a device without stages exceeds."""


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes are looked at where a search goes on to everything."""
    monkeypatch.delenv(allow.VARIABLE, raising=False)


def whole() -> Model:
    """Layers that tensor parallelism cannot split into 2, 3, 4, 6 or 12 parts."""
    return layoutopt.from_huggingface(
        {
            "model_type": "llama",
            "hidden_size": 1792,
            "intermediate_size": 4801,
            "num_hidden_layers": 18,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "vocab_size": 997,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        batch=24,
        length=512,
    )


def question(model: Model, space: dict[str, Any] | None = None, **own: Any) -> SearchQuestion:
    asked = {"mesh": None, "devices": 12, "hardware": "h100", "objective": "time", "framework": "megatron"}
    return SearchQuestion.of(
        model, {**asked, **own}, SearchSpace(**(space or {})), Limits(memory=LIMIT), None
    )


def probes(of: SearchQuestion) -> tuple[Request, Probes]:
    request = of.request.wider(of.spaces[-1])
    return request, Probes(request, () if of.renames and not request.allowed.named else of.shapes, 12)


def test_a_recipe_is_a_layout_of_the_widened_question() -> None:
    asked = question(whole())
    request, recipes = probes(asked)
    found = recipes.fastest(UNLIMITED, math.inf, lambda *_: None)
    assert found is not None and found.peak <= LIMIT
    priced: Evaluation = evaluate(request.model, found.mesh, found.layout, request.hardware, found.options)
    assert (priced.cost.step_seconds, priced.memory.peak) == (found.seconds, found.peak)
    wider = asked.beyond(found)
    assert found.options.microbatches in wider.spaces[-1].microbatches and found.mesh in wider.shapes
    start = WarmStart(request.like(allowed=wider.spaces[-1]), wider.shapes, probed=found)
    known = Incumbents(start.request, renames=True)
    known.know(start)
    assert [each.seconds for each in known.found] == [found.seconds]


def test_no_recipe_is_slower_than_what_is_known() -> None:
    _, recipes = probes(question(whole()))
    assert recipes.fastest(UNLIMITED, 1e-6, lambda *_: None) is None


@pytest.mark.parametrize(
    ("space", "own"),
    [
        ({"microbatches": "4"}, {}),
        ({"schedule": "1f1b", "pipeline": "layers"}, {}),
        ({"pins": "layers:pipe"}, {}),
        ({"pins": "layers:pipe"}, {"mesh": "data:2;pipe:6", "devices": None}),
    ],
)
def test_what_somebody_said_stays(space: dict[str, Any], own: dict[str, Any]) -> None:
    _, recipes = probes(question(whole(), space, **own))
    found = recipes.fastest(UNLIMITED, math.inf, lambda *_: None)
    assert found is not None
    assert found.options.microbatches == 4 or "microbatches" not in space
    assert found.options.schedule == "1f1b" or "schedule" not in space
    assert str(found.mesh) == own.get("mesh", str(found.mesh))
    assert "pins" not in space or found.layout["layers"] == ("pipe",)


def test_a_search_answers_with_a_recipe_where_nothing_usual_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layoutopt.optimize.request.BEYOND", 20.0)
    model = whole()
    plan = layoutopt.search(
        model,
        "data:2;data2:4",
        space=SearchSpace(microbatches="3,12", storage="zero1", recompute="never"),
        hardware="h100",
        framework="megatron",
        memory=2.8e9,
        alternatives=False,
    )
    assert plan.data.pipeline and plan.predicted.peak_memory_bytes <= 2.8e9
    assert covers(plan.allowed, model, plan, lambda _: ())
    explained = layoutopt.explain(plan, time_limit=1)
    assert explained.evaluation.cost.step_seconds == plan.predicted.step_seconds


def test_meshes_that_only_a_recipe_has_are_not_called_searched() -> None:
    two = {(24,), (12, 2), (2, 12), (8, 3), (3, 8), (6, 4), (4, 6)}
    for shapes in (two, two | {(2, 4, 3)}):
        (left,) = other_meshes(Mesh("data:24"), shapes)
        assert left.allow == "--max-axes 3"
