"""A proof says what it is of: how many layouts, and which choices are none of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from examples.transformer_lm import model as transformer
from layoutopt.formulation.couplings import count_layouts
from layoutopt.frameworks import says
from layoutopt.optimize.problems.subproblems import listed
from layoutopt.plan.build import parse_plan
from layoutopt.plan.covered import CoveredSpace, UncoveredChoices, count_text
from layoutopt.space.allow import found
from layoutopt.space.decisions import ARGUMENTS, KINDS, Decisions, SearchSpace, left_out
from layoutopt.space.diloco import Rarely
from layoutopt.space.kind import Decision, Target
from layoutopt.space.recompute import Recompute
from mesh_tf_core.ir.dims import LARGEST
from tests.layoutopt.models import EXAMPLES, SMALL
from tests.searching import search

MESH = mtf.Mesh("x:2;y:2")
TARGET = Target(transformer(**{**SMALL, "layers": 4}, attention="fused"), MESH)
ASKED = set(ARGUMENTS)
NOT_CHOSEN = {"pins", "forbid", "diloco"}
"""Fields of `SearchSpace` that say where, or what is given: nothing more of them can be allowed."""


def names(allowed: SearchSpace, target: Target = TARGET) -> set[str]:
    return {left.kind for left in left_out(target, allowed) if not left.finer}


def test_every_kind_says_what_it_can_choose_and_what_was_left_out() -> None:
    for kind in KINDS:
        assert kind.label, kind
        assert kind.everything is not Decision.everything
    said = {name for kind in KINDS for name in kind.everything(TARGET)}
    assert said == ASKED - NOT_CHOSEN


def test_every_kind_finds_its_choices_for_the_largest_sizes() -> None:
    """Without a loop over all numbers up to a size, which would not end."""
    huge = Target(transformer(**{**SMALL, "layers": LARGEST, "batch": LARGEST, "length": LARGEST}), MESH)
    for kind in KINDS:
        assert {*kind.everything(huge)} == {*kind.everything(TARGET)}
    assert left_out(huge, SearchSpace())


def test_with_everything_allowed_only_what_no_search_chooses_is_left_out() -> None:
    wide = SearchSpace(**found([TARGET], everything=True))
    assert names(wide) == {"DiLoCo replicas"}
    for name in ASKED - NOT_CHOSEN:
        assert getattr(wide, name) != getattr(
            replace(SearchSpace(microbatches=(1,)), storage=(), microbatches=()), name
        )


class Watched:
    """What is allowed, and which fields were read."""

    def __init__(self, allowed: SearchSpace) -> None:
        self.allowed, self.read = allowed, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.allowed, name)

    def said(self, name: str) -> Any:
        self.read.add(name)
        return self.allowed.said(name)


def test_no_field_of_what_is_allowed_is_forgotten() -> None:
    """A new field that no kind reads when it says what was left out is a proof that says too much."""
    watched: Any = Watched(replace(SearchSpace(**found([TARGET], everything=True)), pins={}))
    list(left_out(TARGET, watched))
    assert watched.read >= ASKED


@pytest.mark.parametrize("name", sorted(ASKED - NOT_CHOSEN))
def test_less_allowed_is_said(name: str) -> None:
    wide, plain = (
        SearchSpace(**found([TARGET], everything=True)),
        SearchSpace(context=("gather",), microbatches=(1,)),
    )
    less = replace(wide, **{name: plain.__dict__[name] if name != "storage" else ("layout",)})
    if name == "recompute":
        less = replace(less, recompute=(False,))
    before, after = set(left_out(TARGET, wide)), set(left_out(TARGET, less))
    assert (after - before) or (name == "schedule" and less.schedule != wide.schedule)
    options = {left.allow.partition(" ")[0] for left in after - before}
    assert f"--{name.replace('_', '-')}" in options


def test_pins_are_said() -> None:
    whats = {left.what for left in left_out(TARGET, SearchSpace(pins={"batch": ("x",)}, microbatches=(1,)))}
    assert "splits that --pin or --forbid exclude" in whats


def test_a_plan_carries_it() -> None:
    plan = search(EXAMPLES["mlp"](), mesh=MESH, hardware="tpu-v3", microbatches=(1,))
    space = plan.data.space
    assert plan.solver.layouts_considered == f"{space.layouts:,}"
    assert [left.model_dump() for left in space.not_looked_at][: len(KINDS)]
    assert "offloading" in space.unseen and space.allow == "--allow everything --diloco AXIS"
    wide = search(EXAMPLES["mlp"](), mesh=MESH, hardware="tpu-v3", allow="everything").data.space
    assert (wide.unseen, wide.allow) == (Rarely.label, "--diloco AXIS")
    again = parse_plan(json.loads(json.dumps(plan.to_json())))
    assert again.data.space == space
    older = plan.to_json()
    del older["space"]
    assert parse_plan(older).data.space is None


@pytest.mark.nightly
def test_meshes_are_said() -> None:
    given = search(EXAMPLES["mlp"](), mesh="x:4", hardware="tpu-v3", microbatches=(1,))
    free = search(EXAMPLES["mlp"](), devices=4, max_axes=1, hardware="tpu-v3", microbatches=(1,))
    wide = search(EXAMPLES["mlp"](), devices=4, hardware="tpu-v3", microbatches=(1,))
    said = [[x.what for x in p.data.space.not_looked_at if x.kind == "meshes"] for p in (given, free, wide)]
    assert said == [["other meshes"], ["meshes of more than 1 axes"], []]


def test_words() -> None:
    left = (
        UncoveredChoices(kind="pipelines", what="pipelines", allow="--pipeline layers"),
        UncoveredChoices(kind="offloading", what="offloading of weights", allow="--offload weights"),
        UncoveredChoices(
            kind="offloading", what="offloading of the optimizer's state", allow="--offload optimizer"
        ),
        UncoveredChoices(kind="offloading", what="offloading of single variables", finer=True),
        UncoveredChoices(kind="splits", what="splits of single operations", finer=True),
    )
    space = CoveredSpace(layouts=1_859_000_000_000, not_looked_at=left)
    assert space.count == "1.9e12 layouts" and count_text(98_304) == "98,304"
    assert space.limits == (
        "pipelines, offloading (--allow everything); finer options of splits (see explain)"
    )


def test_the_space_is_that_of_all_meshes_not_of_the_best_one() -> None:
    """On a mesh of one axis nothing but the batch is split, and the two layers cannot be four stages."""
    model = transformer(**{**SMALL, "layers": 2, "batch": 8})
    found = search(model, devices=4, hardware="h100", storage="layout", microbatches=(1,))
    assert len(found.mesh.axes) == 1  # else the test tests nothing
    alone = names(found.allowed, Target(model, found.mesh))
    said = {each.kind for each in found.data.space.not_looked_at if not each.finer}
    assert "pipelines" in said - alone
    assert len({(x.kind, x.what) for x in found.data.space.not_looked_at}) == len(
        found.data.space.not_looked_at
    )


@pytest.mark.nightly
def test_a_plan_whose_mesh_has_no_pipeline_is_explained() -> None:
    model = transformer(**{**SMALL, "layers": 2, "batch": 65536})
    asked: dict[str, Any] = {"storage": "layout", "recompute": (False,), "microbatches": (2,)}
    found = search(model, devices=4, hardware="h100", pipeline="layers", **asked)
    assert len(found.mesh.axes) == 1 and found.allowed.pipeline
    assert layoutopt.explain(found, hardware="h100").splits[0].proven


def test_layouts_with_stages_are_counted_once_for_the_axes_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each schedule and each recomputation in stages: a plan counts after its time limit."""
    counted: list[Decisions] = []

    def counting(decided: Decisions) -> int:
        counted.append(decided)
        return count_layouts(decided)

    model = transformer(**{**SMALL, "layers": 4, "batch": 8})
    some = SearchSpace(pipeline=("layers",), schedule=("gpipe", "1f1b", "zb-h1"), microbatches=(2, 4))
    problems = [*listed(model, [mtf.Mesh("pipe:2;data:2")], some.but(recompute=(False, True)))]
    monkeypatch.setattr("layoutopt.optimize.problems.subproblems.count_layouts", counting)
    numbers = {each.key: each.layouts for each in problems}
    staged = {key for key in numbers if key.stages}
    once = {(key.microbatches, frozenset(a for _, axes in key.stages for a in axes)) for key in numbers}
    assert len(counted) == len(once) < len(staged) and all(numbers.values())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("framework", ["megatron", "torch"])
@pytest.mark.parametrize("mesh", ["pipe:{}", "pipe:{};data:2", "pipe:{};data:2;model:2"])
@pytest.mark.parametrize("ways", [2, 3])
def test_layouts_with_stages_are_as_many_as_their_decisions_have(
    framework: str, mesh: str, ways: int
) -> None:
    """Also where nothing but stages can lie over their axis, and no layout is without stages."""
    model = transformer(**{**SMALL, "layers": 12})
    allowed: dict[str, Any] = {
        "restriction": says(framework).of(model),
        "microbatches": (4,),
        "schedule": ("1f1b",),
    }
    some = SearchSpace(pipeline=("layers",), **allowed)
    every = listed(model, [mtf.Mesh(mesh.format(ways))], some)
    problems = [each for each in every if ("layers", ("pipe",)) in each.key.stages]
    assert problems
    for each in problems:
        left = each.decided.within({n: each.decided.options[n][:1] for n in each.decided.of(Recompute)})
        assert each.layouts == count_layouts(left) >= 1
