"""Frameworks: what they can express holds of every plan under them, which their export then writes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import pytest

import layoutopt
import layoutopt.frameworks
import mesh_tf_core as mtf
from costmodels.frameworks import DEFAULT, framework_names, load_framework
from costmodels.hardware import load_hardware, machine_of
from examples import mlp, moe_lm, transformer_lm, transformer_seq2seq
from layoutopt.analysis.lint import unexpressed
from layoutopt.frameworks import as_built, differences, says
from layoutopt.front_ends import FRONT_ENDS
from layoutopt.importers.huggingface.configuration import FORMS
from layoutopt.optimize.driver.search import LayoutSearch
from layoutopt.optimize.entry import unrestricted
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout
from layoutopt.plan.build import decided
from layoutopt.plan.export import FORMATS, export
from layoutopt.plan.exported import Exported, placed
from layoutopt.plan.units import seconds_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.decisions import ARGUMENTS, SearchSpace, beyond, decisions
from layoutopt.space.objective import Objective
from layoutopt.space.restriction import EVERYTHING
from layoutopt.space.storage import Storage
from reports.views import facts
from tests.layoutopt.every_kind import whole_question
from tests.layoutopt.test_every_kind import checked
from tests.marks import by_day

NAMED = [name for name in framework_names() if load_framework(name).says == name != DEFAULT]
SIZES = {"layers": 2, "d_model": 32, "d_kv": 8, "heads": 4, "d_ff": 64, "vocab": 64, "batch": 16, "length": 8}
MODELS = {  # made once: what a search lowers, another one finds there
    "dense": cache(lambda: transformer_lm.model(**SIZES, kv_heads=2)),
    "experts": cache(lambda: moe_lm.model(**SIZES, experts=4)),
}


def test_each_file_is_what_some_framework_says() -> None:
    said = {load_framework(name).says for name in framework_names()} - {DEFAULT}
    assert {each.name.replace("_", "-") for each in iter_modules(layoutopt.frameworks.__path__)} == said
    assert all(says(name).name == name for name in said)
    assert says(DEFAULT) is EVERYTHING is says("mine")


@pytest.mark.parametrize(
    ("framework", "model", "objective"),
    by_day(itertools.product(NAMED, MODELS, ["time", "memory"]), every=9),
)
@pytest.mark.one_in(6)
def test_a_plan_under_a_framework_is_one_that_it_can_express(
    framework: str, model: str, objective: str
) -> None:
    """Also the plan with the least memory, in which all is stored split and recomputed."""
    built = MODELS[model]()
    hardware = "tpu-v4" if framework == "mesh-tensorflow" else "h100"
    asked = {"mesh": "a:2;b:2", "microbatches": "1,2", "alternatives": False}
    plan = layoutopt.search(built, hardware=hardware, framework=framework, objective=objective, **asked)
    assert plan.data.framework == framework
    assert plan.data.space is not None and plan.data.space.expressed_by == framework
    said = decided(plan.options, plan.layout, built.stages(plan.mesh, plan.layout))
    assert beyond(says(framework), said) is None
    assert (
        unexpressed(built, load_hardware(hardware, framework), plan.mesh, plan.layout, plan.options)[0] == ""
    )
    if framework in FORMATS:
        tensors = placed(built.lower(plan.mesh, plan.layout, plan.options))
        export(Exported("", plan.mesh, plan.layout, *tensors, said), framework)


@pytest.mark.parametrize("framework", NAMED)
def test_the_plain_value_of_every_field_is_allowed(framework: str) -> None:
    """As a plan records the space of its search, which explain searches again. MaxText always recomputes."""
    plain = {name: argument.plain(getattr(SearchSpace(), name)) for name, argument in ARGUMENTS.items()}
    plain = {name: value for name, value in plain.items() if isinstance(value, tuple)}
    if framework == "maxtext":
        with pytest.raises(
            mtf.UserError, match="--recompute never: maxtext cannot express this; it can expre"
        ):
            says(framework).narrowed(SearchSpace(**plain), SearchSpace())
        usual = says(framework).narrowed(SearchSpace(), SearchSpace())
        assert usual.recompute == ("keep=products+attention", True)
        assert says(framework).narrowed(usual, SearchSpace()) == usual
        del plain["recompute"]
    space = SearchSpace(**plain)
    assert says(framework).narrowed(space, SearchSpace()).but(recompute=space.recompute) == space


def test_a_plan_under_a_framework_is_explained_under_it() -> None:
    built = mlp.model()
    plan = layoutopt.search(built, "a:2;b:2", hardware="h100", framework="torch", microbatches="1,2")
    explained = layoutopt.explain(plan, check=True)
    assert (
        explained.proof is not None
        and "time limit" not in explained.proof.words
        and not explained.disagreements
    )


@pytest.mark.nightly
def test_what_a_framework_leaves_is_the_best_of_all_layouts() -> None:
    """With the framework's prices; the share is of the answer's step."""
    built, asked = MODELS["dense"](), {"mesh": "a:2;b:2", "hardware": "h100", "microbatches": "1,2"}
    plan = layoutopt.search(built, framework="maxtext", **asked)
    machine = replace(load_hardware("h100", "maxtext"), framework=DEFAULT)
    every = layoutopt.search(built, **{**asked, "hardware": machine}, alternatives=False)
    whole, own = every.predicted.step_seconds, plan.predicted.step_seconds
    assert plan.data.left is not None and plan.data.left == pytest.approx(1 - whole / own)
    if plan.data.left:
        assert plan.data.unrestricted is not None and plan.data.unrestricted.predicted is not None
        assert plan.data.unrestricted.predicted.step_seconds == whole


def test_the_comparison_takes_no_longer_than_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be far harder; the answer is known, and nobody asked for it."""
    limits = list[float | None]()

    def looked(request: Request, *_: object) -> dict[str, float]:
        limits.append(request.clock.limit)
        return {}

    monkeypatch.setattr("layoutopt.optimize.entry.unrestricted", looked)
    layoutopt.search(mlp.model(), "a:2", hardware="h100", framework="torch", allow="usual")
    layoutopt.search(mlp.model(), "a:2", hardware="h100", framework="torch", allow="usual", time_limit=600)
    assert limits[0] is not None and limits[0] < 60 and limits[1] == 600


def test_what_was_not_searched_to_its_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """That nothing is faster is said of searches that ended alone."""
    model, machine, meshes = mlp.model(), machine_of("h100", "torch", None), [mtf.Mesh("a:2")]
    limits = 1e12, Objective.TIME, SearchSpace(microbatches="1"), 1, Clock(None), None, None
    request = Request(model, machine, *limits)
    mesh, layout = meshes[0], mtf.Layout("batch:a")
    best = EvaluatedLayout(mesh, layout, mtf.Options(), request.evaluator(mesh, layout, mtf.Options()))

    def ended(search: LayoutSearch, *_: object) -> EvaluatedLayout:
        search.proven = False
        return best

    monkeypatch.setattr(LayoutSearch, "run", ended)
    said = unrestricted(request, request.allowed, meshes, best, False)
    assert "left" not in said and said["notes"][0].endswith(
        "did not end; they save an unknown part of the step"
    )
    twice = request.evaluator(mesh, layout, mtf.Options(microbatches=2))
    best, slow = sorted((best, replace(best, evaluation=twice)), key=lambda each: each.seconds)
    said = unrestricted(request, request.allowed, meshes, slow, False)
    assert said["left"] > 0 and said["notes"][0].endswith("save this much or more of the step")


@pytest.mark.parametrize("framework", by_day(NAMED, every=3, first=1))
@pytest.mark.one_in(3)
def test_an_answer_under_a_framework_is_the_best_of_all(framework: str) -> None:
    for seed in (3, 10):
        checked(whole_question(seed, 24, restriction=says(framework)), seed)


@pytest.mark.nightly
@pytest.mark.parametrize("framework", NAMED)
def test_many_answers_under_a_framework_are_the_best_of_all(framework: str) -> None:
    for seed in range(4000, 4030):
        checked(whole_question(seed, 24, restriction=says(framework)), seed)


def tensor_splits(framework: str) -> set[tuple[tuple[str, ...], ...]]:
    """The splits of key-value heads, the queries of each, d_ff and vocab that a framework has."""
    model, mesh = MODELS["dense"](), mtf.Mesh("a:2;b:2")
    space = SearchSpace(microbatches=(1,), restriction=says(framework).of(model))
    coupled = decisions(model.training_step().graph, mesh, space).couplings
    (each,) = (c for c in coupled if {"heads", "group", "d_ff", "vocab"} <= {*c.names})
    places = [each.names.index(name) for name in ("heads", "group", "d_ff", "vocab")]
    return {tuple(row[i] for i in places) for row in each.rows}


def test_heads_and_d_ff_and_vocab_are_split_together() -> None:
    """Two key-value heads cannot be split over four devices, unless they are copied (Megatron)."""
    one = {((axis,), (), (axis,), (axis,)) for axis in "ab"} | {((), (), (), ())}
    assert tensor_splits("torchtitan") == one
    four = ("a", "b")
    assert tensor_splits("megatron") - one == {((x,), (y,), four, four) for x, y in ("ab", "ba")} | {
        ((), (axis,), (axis,), (axis,)) for axis in "ab"
    }


def test_hybrid_sharding_is_of_the_stages_that_a_framework_has() -> None:
    """MaxText stores over a part of the data axes at zero3 alone, PyTorch at zero2 too."""
    model, mesh = MODELS["dense"](), mtf.Mesh("a:2;b:2")
    for framework, hybrid in (("maxtext", {"zero3"}), ("torch", {"zero2", "zero3"})):
        own = says(framework).of(model)
        space = own.narrowed(SearchSpace(microbatches=(1,), near=("b",))).but(restriction=own)
        decided = decisions(model.training_step().graph, mesh, space)
        (each,) = (c for c in decided.couplings if any(name in c.names for name in decided.of(Storage)))
        over = {row[-1][0] for row in each.rows if row[-1][1:] == ("b",) and row[0] == ("a", "b")}
        assert each.names[0] == "batch" and over == hybrid


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
TINY |= {"vocab_size": 64, "max_position_embeddings": 16, "num_key_value_heads": 2}


def of(library: str) -> Any:
    """A model of a program in a library."""
    graph = MODELS["dense"]().graph
    return SimpleNamespace(front_end=library, framework=library, given=None, graph=graph)


@pytest.mark.parametrize("name", framework_names())
@pytest.mark.one_in(4)
def test_an_answer_says_where_a_framework_runs_another_program(name: str) -> None:
    """A user's program in another library, or where it has models of its own; a family that it lacks."""
    runs = load_framework(name).programs
    families = () if runs is None else runs.families or ()
    assert {*families} <= {*FORMS}
    for front in FRONT_ENDS.values():
        said = [*differences(name, of(front.name), "bfloat16")]
        assert bool(said) == (runs is not None and front.name not in runs.libraries)
        assert not said or f"--framework {front.name} predicts" in said[0]
    for family in ("llama", "olmo2"):
        model = layoutopt.from_huggingface({**TINY, "model_type": family}, batch=2)
        chip = "tpu-v4" if name == "mesh-tensorflow" else "h100"
        notes = layoutopt.cost(model, "data:2", "batch:data", chip, framework=name).notes
        lacks = runs is not None and runs.families is not None and family not in families
        assert any(f"has no model of the family '{family}'" in note for note in notes) == lacks


@pytest.mark.parametrize("name", framework_names())
@pytest.mark.one_in(4)
def test_an_answer_says_where_a_framework_multiplies_in_another_type(name: str) -> None:
    """Unless it is told the program's: MaxText and torchtitan take bfloat16."""
    runs = load_framework(name).programs
    for dtype in ("float32", "bfloat16"):
        model = layoutopt.from_huggingface({**TINY, "model_type": "llama"}, batch=2, dtype=dtype)
        chip = "tpu-v4" if name == "mesh-tensorflow" else "h100"
        notes = layoutopt.cost(model, "data:2", "batch:data", chip, framework=name).notes
        said = [note for note in notes if "multiplies in bfloat16 unless its" in note]
        assert bool(said) == (runs is not None and runs.dtype == "bfloat16" and dtype == "float32")
        assert not said or said[0].endswith("--set dtype=bfloat16")
    for front in FRONT_ENDS.values():
        assert [*differences("torchtitan", of(front.name), "float32")][-1].endswith(front.half)


def test_a_release_has_models_of_its_own() -> None:
    def own(name: str) -> tuple[str, ...]:
        runs = load_framework(name).programs
        return () if runs is None else runs.families or ()

    assert "llama4_text" in own("torchtitan@0.2") and "llama4_text" not in own("torchtitan")


@pytest.mark.parametrize("name", ["torch", "deepspeed", "torch:kernels=fused", "torchtitan", "jax"])
@pytest.mark.one_in(4)
def test_an_answer_says_where_the_host_takes_longer(name: str) -> None:
    """In eager PyTorch, with few tokens. No answer of a compiled program says so, nor of large kernels."""
    for length, sizes in ((8, {}), (1024, {"d_model": 4096, "d_ff": 16384, "batch": 64, "vocab": 32768})):
        model = transformer_lm.model(**{**SIZES, **sizes, "length": length, "dtype": "bfloat16"})
        found = layoutopt.cost(model, "data:8", "batch:data", "h100", framework=name)
        waits = any(note.startswith("the host needs about") for note in found.notes)
        eager = load_hardware("h100", name).chip.host_interval is not None
        assert waits == (eager and length == 8), found.notes
        p = found.predicted
        step, device = p.step_seconds, p.device_seconds
        assert waits == (step > device * (1 + 1e-9)) and p.tokens_per_second == pytest.approx(
            model.tokens / step
        )
        headline = f"at least {seconds_text(step)} to launch its kernels, which take {seconds_text(device)}"
        assert facts.step(p).startswith(headline if waits else seconds_text(step))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("build", [transformer_lm.model, moe_lm.model, transformer_seq2seq.model])
def test_megatron_pads_the_vocabulary(build: Callable[..., mtf.Model]) -> None:
    """Parameters, time and memory are those of a model that was built so, also once gradients are known."""
    small = {"d_model": 64, "d_kv": 16, "heads": 4, "d_ff": 128, "batch": 8, "length": 16}
    given, own = build(**small, vocab=1001), build(**small, vocab=1024)
    mesh, layout = mtf.Mesh("data:2;model:2"), mtf.Layout("batch:data;heads:model;d_ff:model;vocab:model")
    for _ in range(2):
        found, built = (evaluate(m, mesh, layout, load_hardware("h100", "megatron")) for m in (given, own))
        assert found.model.parameters == built.model.parameters > given.parameters
        assert found.predicted == built.predicted
        assert "megatron pads vocab from 1,001 to 1,024" in found.notes and not built.model.given
        assert found.model.fingerprint == given.fingerprint != built.model.fingerprint
        assert as_built("megatron", found.model) is found.model
        given.training_step()
    for name in framework_names():
        assert (as_built(name, given) is given) == (name != "megatron")
    own = build(**small, vocab=1002, float8="tensor")  # its gradients name tensors of their graph
    assert as_built("megatron", own) is own
    found = evaluate(own, mesh, layout, load_hardware("h100", "megatron"))
    assert any(note.startswith("megatron pads vocab: the prediction is without") for note in found.notes)


def test_a_plan_with_a_padded_vocabulary_goes_on_to_its_framework(tmp_path: Path) -> None:
    given = transformer_lm.model(
        layers=2, d_model=64, d_kv=16, heads=4, d_ff=128, vocab=1001, batch=8, length=16, dtype="bfloat16"
    )
    plan = layoutopt.search(
        given,
        "data:2;model:4",
        hardware="h100",
        framework="megatron",
        pins={"heads": ("model",)},
        allow="usual",
    )
    assert plan.layout.axes("vocab") == ("model",) and plan.data.model.parameters > given.parameters
    plan.save(tmp_path / "plan.json")
    again = layoutopt.load_plan(tmp_path / "plan.json").of(given)
    assert again.model is not None and again.model.parameters == plan.data.model.parameters
    tensors = placed(again.model.lower(again.mesh, again.layout, again.options))
    text = export(
        Exported("", again.mesh, again.layout, *tensors, decided(again.options, again.layout)), "megatron"
    )
    assert "--make-vocab-size-divisible-by 32\n" in text  # times 4 ranks: 128
