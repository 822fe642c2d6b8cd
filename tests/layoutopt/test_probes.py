"""Recipes beyond the meshes, rounds, microbatches and recomputed layers that a search lists."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import layoutopt
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.optimize.heuristics.incumbents import Incumbents, WarmStart, covers
from layoutopt.optimize.heuristics.probes import Probes, first_recipes
from layoutopt.optimize.heuristics.recipes import Recipe, Recipes, Step
from layoutopt.optimize.problems.question import Limits, SearchQuestion
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.runtime.clock import UNLIMITED
from layoutopt.space import allow
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.mesh_shapes import other_meshes
from layoutopt.space.undivided import stored_at
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import PipelineSchedule
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import policies
from mesh_tf_core.model import Model
from reports.views import facts

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


def mixture() -> Model:
    """A mixture of experts."""
    return layoutopt.from_huggingface(
        {
            "model_type": "mixtral",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "vocab_size": 997,
            "torch_dtype": "bfloat16",
        },
        batch=24,
        length=256,
    )


def question(model: Model, space: dict[str, Any] | None = None, **own: Any) -> SearchQuestion:
    memory = own.pop("memory", LIMIT)
    asked = {"mesh": None, "devices": 12, "hardware": "h100", "objective": "time", "framework": "megatron"}
    return SearchQuestion.of(
        model, {**asked, **own}, SearchSpace(**(space or {})), Limits(memory=memory), None
    )


def probes(of: SearchQuestion, devices: int = 12) -> tuple[Request, Probes]:
    request = of.request.wider(of.spaces[-1])
    given = () if of.renames and not request.allowed.named else of.shapes
    return request, Probes(Recipes(request, given, devices), UNLIMITED)


def fastest(recipes: Probes, below: float = math.inf) -> EvaluatedLayout | None:
    """The last of recipes, each of which is faster than the one before."""
    found = [*recipes.better(below, lambda *_: None)]
    assert [each.seconds for each in found] == sorted((each.seconds for each in found), reverse=True)
    assert all(each.seconds < below for each in found)
    return found[-1] if found else None


def test_a_recipe_is_a_layout_of_the_widened_question() -> None:
    asked = question(whole())
    request, recipes = probes(asked)
    found = fastest(recipes)
    assert found is not None and found.peak <= LIMIT
    priced: Evaluation = evaluate(request.model, found.mesh, found.layout, request.hardware, found.options)
    assert (priced.cost.step_seconds, priced.memory.peak) == (found.seconds, found.peak)
    wider = asked.beyond(found)
    assert found.options.microbatches in wider.spaces[-1].microbatches and found.mesh in wider.shapes
    start = WarmStart(request.like(allowed=wider.spaces[-1]), wider.shapes, probed=found)
    known = Incumbents(start.request, renames=True)
    known.know(start)
    assert [each.seconds for each in known.found] == [found.seconds]


def test_recipes_come_first_where_no_named_layout_fits() -> None:
    """Where one does, they wait for the usual layouts."""
    asked, roomy = question(whole()), question(whole(), memory=60e9)
    first, none = ([*first_recipes(each, WarmStart(each.request, each.shapes))] for each in (asked, roomy))
    assert first and first[-1].peak <= LIMIT and first[-1].evaluation.pipeline
    assert not none


def test_ranks_without_work_of_their_own_do_not_make_a_family_slow() -> None:
    """Where the batch does not split over all devices, a family is priced on meshes with idle stages."""
    costs = probes(question(whole()))[1].costs
    apart = costs.of(Recipe(Mesh("axis0:12"), ()), "zero1")
    idle = costs.of(Recipe(Mesh("axis0:3;axis1:4"), ("axis0",)), "zero1")
    assert apart and idle and idle.stages == 3
    assert idle.ideal(18) == pytest.approx(apart.ideal(18), rel=0.2)


def test_no_recipe_is_slower_than_what_is_known() -> None:
    assert fastest(probes(question(whole()))[1], 1e-6) is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("memory", [1.1, 1.3])
def test_recipes_recompute_as_few_layers_as_fit(memory: float) -> None:
    """Without stages: of all numbers of layers about the fewest that fit."""
    model, own = whole(), {"mesh": "data:12", "devices": None, "framework": "torch"}
    space = {"pins": "batch:data", "storage": "zero3", "microbatches": "1"}
    request, recipes = probes(question(model, space, **own))
    mesh, layout, machine = Mesh("data:12"), Layout("batch:data"), request.hardware
    stored = Options(stored_at(request.model.graph.variables.values(), "zero3"))

    def price(text: str) -> Evaluation:
        options = replace(stored, recompute=policies([text] if text else []))
        return evaluate(request.model, mesh, layout, machine, options)

    least, most = price("layers").memory.peak, price("").memory.peak
    limit = recipes.limit = least + (memory - 1) * (most - least)
    found = fastest(recipes)
    assert found is not None
    (again,) = found.options.recompute
    assert price(f"layers:count={again.only}").memory.peak <= limit
    assert price(f"layers:count={again.only - 2}" if again.only > 2 else "").memory.peak > limit


def test_recipes_split_weights_and_experts_at_once() -> None:
    """The layout of a mixture that fits with both alone."""
    families = {each.family for each in probes(question(mixture(), {"pipeline": ""}))[1].recipes.every()}
    kinds = {tuple(kind for kind, _ in family) for family in families}
    assert {(), ("experts",), ("weights",), ("experts", "weights")} <= kinds


@pytest.mark.one_in(4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:3", "zb-v", "dualpipev"])
def test_every_schedule_has_a_bound_before_its_graph(schedule: str) -> None:
    """Some stage of any schedule has an equal part of the layers' products."""
    request, recipes = probes(question(whole(), framework="torch"))
    mesh = Mesh("axis0:3;axis1:4")
    step = Step(Recipe(mesh, ("axis0",)), "zero1", 6, schedule=schedule)
    found = recipes.recipes.evaluated(step)
    least = request.evaluator.least(mesh, {"layers": PipelineSchedule.named(schedule, 3, 6)})
    assert found is not None and found.seconds / 10 < least <= found.seconds


def test_an_interrupted_search_keeps_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C right after a recipe was found, before everything is searched."""
    told = list[str]()

    def better(words: str, seconds: float, size: int) -> None:
        told.append(words)
        if "pipeline" in words or "stages" in words:
            raise KeyboardInterrupt

    plan = layoutopt.search(
        whole(),
        "data:2;data2:4",
        space=SearchSpace(microbatches="3,12", storage="zero1", recompute="never"),
        hardware="h100",
        framework="megatron",
        memory=2.8e9,
        alternatives=False,
        keep_best=True,
        on_better=better,
    )
    assert plan.stopped and plan.data.pipeline and len(told) == 1


def test_an_interrupted_search_keeps_its_first_recipe() -> None:
    """Ctrl-C before the usual layouts."""

    def better(words: str, seconds: float, size: int) -> None:
        raise KeyboardInterrupt

    asked: dict[str, Any] = {"devices": 12, "hardware": "h100", "framework": "megatron", "memory": LIMIT}
    plan = layoutopt.search(whole(), alternatives=False, keep_best=True, on_better=better, **asked)
    assert plan.stopped and plan.data.pipeline and plan.predicted.peak_memory_bytes <= LIMIT
    assert "usual" not in dict(facts.searched(plan.data))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("space", "own"),
    [
        ({"microbatches": "4"}, {}),
        ({"schedule": "1f1b", "pipeline": "layers"}, {}),
        ({"schedule": "1f1b:layers=2+4+3+3+3+3", "pipeline": "layers"}, {}),
        ({"pins": "layers:pipe"}, {}),
        ({"pins": "layers:pipe"}, {"mesh": "data:2;pipe:6", "devices": None}),
    ],
)
def test_what_somebody_said_stays(space: dict[str, Any], own: dict[str, Any]) -> None:
    _, recipes = probes(question(whole(), space, **own))
    found = fastest(recipes)
    assert found is not None
    assert found.options.microbatches == 4 or "microbatches" not in space
    staged = bool(found.evaluation.pipeline)
    assert not staged or found.options.schedule == space.get("schedule", found.options.schedule)
    assert str(found.mesh) == own.get("mesh", str(found.mesh))
    assert "pins" not in space or found.layout["layers"] == ("pipe",)


@pytest.mark.nightly
def test_a_search_answers_with_a_recipe_where_nothing_usual_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layoutopt.optimize.problems.request.BEYOND", 20.0)
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


def test_experts_that_axes_do_not_divide_are_no_recipe() -> None:
    """Four experts over two of six devices: another family has that."""
    recipes = probes(question(mixture(), {"pipeline": ""}))[1].recipes
    split = {
        r.family[0][1]: recipes.splits(r) for r in recipes.every() if dict(r.family).keys() == {"experts"}
    }
    assert {ways: found is not None for ways, found in split.items()} == {
        (n,): n in (2, 4) for n in (2, 3, 4, 6, 12)
    }


def test_meshes_that_only_a_recipe_has_are_not_called_searched() -> None:
    two = {(24,), (12, 2), (2, 12), (8, 3), (3, 8), (6, 4), (4, 6)}
    for shapes in (two, two | {(2, 4, 3)}):
        (left,) = other_meshes(Mesh("data:24"), shapes)
        assert left.allow == "--max-axes 3"
