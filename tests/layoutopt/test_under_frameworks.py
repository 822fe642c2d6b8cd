"""Answers under a framework: however it was named, and what they say where something was not searched."""

from __future__ import annotations

import itertools
import json
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import layoutopt
from costmodels.frameworks import DEFAULT, framework_names
from costmodels.hardware import load_hardware
from examples import transformer_lm
from layoutopt.analysis.lint import unexpressed
from layoutopt.cli import app
from layoutopt.frameworks import restriction_of, says
from layoutopt.optimize import entry
from layoutopt.optimize.problems.subproblems import Subproblem, listed
from layoutopt.plan.build import Plan, decided, layout_of, options_of
from layoutopt.plan.export import FORMATS, export
from layoutopt.plan.exported import Exported, placed
from layoutopt.plan.units import used_text
from layoutopt.space.allow import resolved
from layoutopt.space.decisions import Decisions, SearchSpace, decisions
from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import Target
from layoutopt.space.recompute import SOME
from layoutopt.space.restriction import RestrictionError
from mesh_tf_core import Layout, Mesh, Options
from mesh_tf_core.errors import InfeasibleError, UserError
from mesh_tf_core.model import Model
from reports.views.facts import left
from tests.layoutopt.test_frameworks import MODELS, SIZES
from tests.marks import by_day

ON = {"mesh": "a:4", "microbatches": "1"}
NOT_SEARCHED = "faster layouts that torch cannot express were not searched: "


def searched(model: str = "dense", **asked: Any) -> Plan:
    return layoutopt.search(MODELS[model](), **{**ON, "hardware": "h100", **asked})


@pytest.mark.nightly
def test_a_search_is_restricted_however_the_framework_is_named() -> None:
    every = [
        searched(framework="torch"),
        searched(hardware="h100-eager"),
        searched(hardware=load_hardware("h100", "torch")),
    ]
    assert {plan.data.space.expressed_by for plan in every if plan.data.space} == {"torch"}
    assert len({(str(plan.layout), plan.predicted.step_seconds, plan.data.left) for plan in every}) == 1
    assert every[0].data.left is not None
    free = searched()
    assert free.data.space is not None and free.data.space.expressed_by == "" and free.data.left is None


@pytest.mark.parametrize(
    ("asked", "why"),
    by_day(
        [
            ({"objective": "memory"}, "the objective is memory"),
            ({"objective": "pareto"}, "the objective is pareto"),
            ({"time_limit": 1e-6}, "the time limit was reached"),
        ]
    ),
)
def test_an_answer_says_why_nothing_faster_was_searched(asked: dict[str, Any], why: str) -> None:
    plan = searched(framework="torch", **asked)
    assert NOT_SEARCHED + why in plan.data.notes and plan.data.left is None


def test_the_report_says_what_a_framework_leaves() -> None:
    plan = searched(framework="maxtext")
    ((name, words),) = left(plan.data)
    page = plan.report()
    assert name.capitalize() in page and words[:20] in page


@pytest.mark.parametrize(
    ("framework", "asked"),
    by_day(
        itertools.product(
            ["torchtitan", "megatron", "deepspeed"], [{}, {"objective": "memory"}, {"memory": 70e3}]
        ),
        every=4,
    ),
)
@pytest.mark.one_in(3)
def test_every_alternative_is_one_that_the_framework_can_express(
    framework: str, asked: dict[str, Any]
) -> None:
    try:
        plan = searched(framework=framework, mesh="a:2;b:2", **asked)
    except InfeasibleError as error:
        assert error.nearest is not None
        plan = error.nearest
    model = MODELS["dense"]()
    for each in plan.alternatives:
        mesh, layout, options = Mesh(each.mesh), layout_of(each), options_of(each)
        export(Exported("", mesh, layout, *placed(model.lower(mesh, layout, options)), each), framework)


@pytest.mark.nightly
def test_a_plan_explained_under_another_framework_is_all_that_frameworks() -> None:
    plan = searched(framework="torch")
    found = layoutopt.explain(plan, framework="megatron")
    own = layoutopt.cost(MODELS["dense"](), plan, hardware="h100", framework="megatron")
    assert found.plan.data.framework == "megatron" and not found.disagreements
    assert found.plan.predicted == own.evaluation.predicted != plan.predicted
    assert found.plan.allowed.restriction.name == "megatron"
    assert found.memory == int(load_hardware("h100", "megatron").usable_memory_bytes)
    assert not found.plan.solver.proven and found.plan.data.left is None
    same = layoutopt.explain(plan)
    assert same.plan is plan


@pytest.mark.nightly
def test_like_a_plan_under_another_framework(tmp_path: Path) -> None:
    """What the first framework could not express is no option that the second is asked for."""
    run, first = CliRunner(), tmp_path / "first.json"
    asked = ["search", "examples/mlp.py", "--mesh", "data:2", "--hardware", "h100", "--quiet"]
    assert run.invoke(app, [*asked, "--framework", "torch", "--out", str(first)]).exit_code == 0
    for other in ("megatron", "maxtext", DEFAULT):
        like = run.invoke(app, ["search", "--like", str(first), "--framework", other, "--json"])
        typed = run.invoke(app, [*asked, "--framework", other, "--json"])
        assert like.exit_code == 0, like.stderr
        one, two = (json.loads(done.stdout) for done in (like, typed))
        assert one["framework"] == other and one["layout"] == two["layout"]
        assert one["predicted"] == two["predicted"] and one["space"] == two["space"]


@pytest.mark.nightly
def test_stages_under_megatron_run_in_an_order_that_it_has() -> None:
    plan = searched(
        framework="megatron", mesh="pipe:2;data:2", microbatches="2", pins="layers:pipe", pipeline="layers"
    )
    assert plan.data.pipeline == {"layers": 2} and plan.data.schedule == "1f1b"


@pytest.mark.parametrize("framework", ["torchtitan", "megatron", "deepspeed"])
@pytest.mark.one_in(3)
def test_experts_lie_where_the_framework_puts_them(framework: str) -> None:
    """Ranks that store the weights whole are no home of torchtitan's experts."""
    model = MODELS["experts"]()
    asked = {"mesh": "a:2;b:2", "storage": "layout", "pins": "experts:b", "alternatives": False}
    plan = searched("experts", framework=framework, **asked)
    said = decided(plan.options, plan.layout)
    tensors = placed(model.lower(plan.mesh, plan.layout, plan.options))
    export(Exported("", plan.mesh, plan.layout, *tensors, said), framework)


FORMS = [name for name in FORMATS if any(isinstance(r, Degrees) for r in says(name).relations)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("framework", by_day(FORMS, every=4))
def test_every_layout_that_a_framework_can_express_is_exported(framework: str, model: str) -> None:
    """Random ones, of whatever the framework can decide."""
    rng, built = random.Random(framework), MODELS[model]()
    own, found = says(framework).of(built), 0
    for mesh in map(Mesh, ("a:2;b:2", "a:2;b:2;c:2")):
        widest = resolved(SearchSpace(allow=("everything",)), [Target(built, mesh)]).settled("time")
        space = own.narrowed(widest).but(restriction=own)
        every = [*listed(built, [mesh], space.but(microbatches=(1, 2)), lambda _: ("b",))]
        for each in rng.sample(every, min(4, len(every))):
            made = None
            with suppress(UserError):  # a schedule that does not suit the number of microbatches
                layout, options = drawn(each.decided, rng).read({})
                made = placed(built.lower(mesh, layout, options))
            if made is not None:
                said = decided(options, layout, built.stages(mesh, layout))
                export(Exported("", mesh, layout, *made, said), framework)
                assert unexpressed(built, load_hardware("h100", framework), mesh, layout, options)[0] == ""
                found += 1
    assert found


@pytest.mark.parametrize("framework", framework_names())
@pytest.mark.one_in(3)
def test_repeated_work_of_experts_is_named_under_every_framework(framework: str) -> None:
    found = layoutopt.cost(MODELS["experts"](), "data:4", "batch:data", hardware="h100", framework=framework)
    work = [f.message for f in found.findings if f.kind == "repeated work"]
    assert any("experts" in message for message in work)


def test_the_axes_that_a_framework_stores_over_are_named() -> None:
    """Plain ZeRO splits what is small over the ranks of the weights, too."""
    layout = "batch:a;expert_batch:a;heads:b;d_ff:b;vocab:b"
    asked = {"hardware": "h100", "framework": "megatron"}
    whole, part = (
        layoutopt.cost(MODELS["experts"](), "a:2;b:2", layout, storage=stage, **asked)
        for stage in ("zero1", "zero1@a")
    )
    (found,) = (f for f in whole.findings if f.kind == "not expressed")
    assert "for storage zero1;" in found.message
    of, limit = part.evaluation, part.limit
    held = used_text(of.memory.peak, limit)
    assert re.fullmatch(
        f"megatron runs this layout with storage zero1@a: step .*, {re.escape(held)}, fits: yes",
        str(found.fix),
    )
    assert not [f for f in part.findings if f.kind == "not expressed"]


def test_storage_that_pipelines_of_a_framework_lack_is_named_as_it_was_given() -> None:
    """Beside `fits`, with what runs instead, and whether that fits."""
    args = ["cost", transformer_lm.__file__, "--mesh", "pipe:2;data:4", "--layout", "layers:pipe;batch:data"]
    args += ["--schedule", "1f1b", "--microbatches", "4", "--set", "batch=16", "--hardware", "h100"]
    args += ["--framework", "torchtitan", "--memory", "20MiB", "--storage"]
    rows = CliRunner().invoke(app, [*args, "zero3"], env={"COLUMNS": "400"}).stdout.splitlines()
    (at,) = (n for n, row in enumerate(rows) if "torchtitan has no setting for storage zero3;" in row)
    assert re.match("fits +yes", rows[at - 1])
    assert re.search(r"with storage zero1: step \d+ % shorter, .* of 20.0 MiB .*, fits: no$", rows[at])
    assert "no setting" not in CliRunner().invoke(app, [*args, "zero1"]).stdout


def test_any_number_of_recomputed_layers_is_expressed_where_the_search_takes_it() -> None:
    """A quarter, a half and three quarters are those that a search tries by itself."""
    built = transformer_lm.model(**{**SIZES, "layers": 8}, kv_heads=2)
    for framework in framework_names():
        said = (says(framework).of(built).says or {}).get("recompute", (SOME,))
        found = layoutopt.cost(
            built, "a:2", "batch:a", hardware="h100", framework=framework, recompute="layers:count=5"
        )
        lost = [f.message for f in found.findings if f.kind == "not expressed" and "count=" in f.message]
        assert bool(lost) == (SOME not in said), (framework, lost)


@pytest.mark.parametrize(
    ("framework", "layout", "lost", "mend"),
    [
        ("megatron", "batch:a;length:b;expert_batch:b", "expert_batch over b", "expert_batch whole"),
        ("megatron", "batch:a;heads:b;d_ff:b", "vocab whole", "vocab over b"),
        ("megatron", "batch:a;d_model:b", "d_model over b", ""),
        ("megatron", "batch:a;length:b;expert_batch:a;expert_length:b", "", ""),
        ("maxtext", "batch:a+b", "recompute never", "recompute layers:keep=products+attention"),
        ("layoutopt", "batch:a;d_model:b", "", ""),
    ],
)
@pytest.mark.one_in(2)
def test_what_a_framework_has_no_setting_for_is_named(
    framework: str, layout: str, lost: str, mend: str
) -> None:
    found = layoutopt.cost(MODELS["experts"](), "a:2;b:2", layout, hardware="h100", framework=framework)
    said = [f for f in found.findings if f.kind == "not expressed"]
    assert [f.message.partition(";")[0] for f in said] == [f"{framework} has no setting for {lost}"] * bool(
        lost
    )
    assert all((f"with {mend}" if mend else "a search under it") in str(f.fix) for f in said)


def test_stages_that_a_framework_excludes_are_refused_before_their_graph_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph would show the same."""
    built, mesh, asked = MODELS["dense"](), Mesh("a:2;b:2"), {"d_ff": ("b",)}
    widest = resolved(SearchSpace(allow=("everything",)), [Target(built, mesh)]).settled("time")

    def made(*_: Any) -> None:
        raise AssertionError("a graph of stages")

    for own in (says(name).of(built) for name in FORMS):
        space = own.narrowed(widest).but(restriction=own, microbatches=(1, 2), pins=asked, storage=("zero3",))
        every, early = [p for p in listed(built, [mesh], space) if p.stages], list[Subproblem]()
        with monkeypatch.context() as patch:
            patch.setattr(Model, "_pipelined", made)
            for each in every:
                with suppress(AssertionError):
                    early += [each] * (each.refused is not None)
        assert early or not every, own.name
        for each in random.Random(own.name).sample(early, min(3, len(early))):
            with pytest.raises(UserError):
                _ = Subproblem(each.key, built, each.space).decided


@pytest.mark.parametrize(
    ("mesh", "pins", "why"),
    [
        ("a:5", {}, r"a \(5\): no axis of this size can split batch or a dimension of each weight .*cannot"),
        (
            "a:2;b:2",
            {"batch": (), "d_ff": (), "length": ()},
            r"a \(2\), b \(2\): no axis of .*\(d_ff cannot|no options agree with .*d_ff whole",
        ),
        ("a:2;b:2", {"batch": ("a",), "heads": ("b",), "d_ff": ()}, r"b \(2\): this axis splits heads.*d_ff"),
        ("a:2", {"batch": ()}, "batch|each weight"),
    ],
)
def test_what_is_in_the_way_of_every_layout_is_named(mesh: str, pins: Any, why: str) -> None:
    built = MODELS["dense"]()
    refused = 0
    for own in (says(name).of(built) for name in FORMS):
        space = own.narrowed(SearchSpace(pins=pins, microbatches=(1,))).but(restriction=own)
        try:
            decisions(built.step_graph, Mesh(mesh), space)
        except RestrictionError as error:
            refused += 1
            assert re.search(why, str(error)) and str(error).startswith(f"{own.name} can"), error
    assert refused >= (2 if len(pins) != 1 else 0)


def test_a_split_that_a_framework_needs_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has set the pin that undoes it."""
    told, plan = list[str](), searched(framework="torch", mesh="a:2", storage="layout", alternatives=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise RestrictionError("torch can express no layout on a:2 with these choices; remove pins")

    monkeypatch.setattr(entry, "search", refuse)
    found = layoutopt.explain(plan, on_progress=lambda done, total, what: told.append(what))
    undone = [f"torch can express no layout with {name}:none on a:2" for name in plan.layout]
    assert undone and [each.reason for each in found.splits] == undone
    assert told[0] == "any memory" and told[-1] == "saved values"


def drawn(every: Decisions, rng: random.Random) -> Decisions:
    """One option of each decision, as the restriction allows them together."""
    for name, options in every.options.items():
        tried = rng.sample(options, len(options))
        every = next(filter(None, (every.within({name: (o,)}).agreeing() for o in tried)))
    return every


@pytest.mark.parametrize("framework", framework_names())
def test_whole_stages_are_recomputed_where_a_framework_can_and_their_layers_once(
    framework: str,
) -> None:
    """Megatron recomputes all layers of a virtual stage from its input, and none of them twice."""
    machine, mesh = load_hardware("h100", framework), Mesh("pipe:2;data:2")
    own = restriction_of(machine.framework)
    model = transformer_lm.model(**{**SIZES, "layers": 4})
    if own.says is not None and "pipeline" not in own.says:
        return
    layout = Layout("layers:pipe;batch:data")
    for loops in ({"tick"}, {"tick", "layers"}):
        options = Options(recompute=loops, microbatches=4, schedule="1f1b")
        refused = unexpressed(model, machine, mesh, layout, options)[0] != ""
        assert refused == (own.says is not None and (framework != "megatron" or len(loops) > 1))
        if framework == "megatron" and not refused:
            tensors = placed(model.lower(mesh, layout, options))
            said = decided(options, layout, model.stages(mesh, layout))
            flags = export(Exported("", mesh, layout, *tensors, said), framework)
            per_stage = max(model.graph.dims()["layers"]) // 2
            assert f"--recompute-num-layers {per_stage}" in flags and per_stage > 1
