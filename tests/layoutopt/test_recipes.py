"""Layouts near those of experts: a search that ends early has looked at every family of problems."""

from __future__ import annotations

from typing import Any

import pytest

import layoutopt
from examples.moe_lm import model as mixture
from layoutopt.optimize.fastest import FastestSearch
from layoutopt.optimize.incumbents import WarmStart
from layoutopt.optimize.question import Limits, SearchQuestion
from layoutopt.optimize.recipes import Recipes
from layoutopt.optimize.request import Request
from layoutopt.optimize.subproblem import ROUNDING, SubproblemSearch
from layoutopt.optimize.subproblems import listed
from layoutopt.runtime.clock import UNLIMITED
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.recompute import again_in
from layoutopt.space.splits import Split
from layoutopt.space.undivided import stored_at
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.remat_policy import Policies, Recomputed

MODEL = mixture(
    layers=8,
    d_model=64,
    d_kv=16,
    heads=4,
    d_ff=64,
    vocab=64,
    batch=16,
    length=16,
    experts=4,
    dtype="bfloat16",
)
MESH = "p:2;a:2;b:2"
SHARDED = stored_at(MODEL.graph.variables.values(), "zero1")


SPACE = SearchSpace(
    pipeline=("layers",),
    schedule=("1f1b",),
    microbatches=(4, 8),
    recompute=(False, True),
    storage="layout,zero1",
)


def asked(**where: Any) -> tuple[Request, WarmStart, SearchQuestion]:
    own = {"mesh": None, "devices": None, "hardware": "h100", "objective": "time", "framework": "megatron"}
    question = SearchQuestion.of(MODEL, own | where, SPACE, Limits(), None)
    return question.request, WarmStart(question.request, question.shapes), question


@pytest.mark.nightly
def test_near_the_best_in_a_moment() -> None:
    """Without any table of a whole problem, within a tenth of the proven best."""
    request, start, _ = asked(mesh=MESH)
    search = FastestSearch(request)
    search.incumbents.subproblems = {each.key: each for each in start.problems}
    Recipes(search.incumbents, request.limit, UNLIMITED, search.hold, search.tell).look(start.problems)
    best = search.incumbents.best()
    where = {"mesh": MESH, "hardware": "h100", "framework": "megatron"}
    proven = layoutopt.search(MODEL, **where, space=SPACE, alternatives=False)
    assert proven.solver.proven and best is not None
    assert proven.predicted.step_seconds <= best.seconds < 1.1 * proven.predicted.step_seconds


def test_every_family_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mesh and use of stages that named splits suit, on meshes of one more axis too."""
    monkeypatch.setattr("layoutopt.optimize.recipes.STAGED", 0)
    monkeypatch.setattr("layoutopt.optimize.recipes.PLAIN", 0)
    request, start, question = asked(devices=8)
    search, looked = FastestSearch(request), set[tuple[Mesh, bool]]()
    search.incumbents.subproblems = {each.key: each for each in start.problems}
    finer = [*listed(MODEL, question.finer, request.allowed, request.evaluator.near)]
    search.incumbents.finer = {each.key: each for each in finer}
    recipes = Recipes(
        search.incumbents,
        request.limit,
        UNLIMITED,
        search.hold,
        lambda problem: looked.add((problem.mesh, bool(problem.key.stages))),
    )
    recipes.look([*start.problems, *finer])
    assert [mesh.shape for mesh in question.finer] == [(2, 2, 2)]
    families = {(each.mesh, bool(each.key.stages)) for each in start.problems}
    assert looked == families | {(question.finer[0], stages) for stages in (False, True)}


@pytest.mark.parametrize("policy", (frozenset(), frozenset({Recomputed("layers")})))
def test_rows_of_stages_with_experts(policy: Policies) -> None:
    """The part of a stack that a stage has lies in its memory, also where storage makes that a copy."""
    request, start, _ = asked(mesh=MESH)
    layout = Layout("batch:a+b;expert_batch:a;experts:b;layers:p")
    options = Options(SHARDED, policy, 4, schedule="1f1b")
    found = (p for p in start.problems if p.key.again == policy and p.microbatches == 4)
    problem = next(p for p in found if p.key.stages == {("layers", ("p",))} and p.key.schedule == "1f1b")
    assert problem.decided.allows(layout, options)
    splits = {name: [layout.axes(name)] for name in problem.decided.of(Split)}
    search = SubproblemSearch.whole(request.evaluator, problem.mesh, problem.decided.within(splits))
    choices = search.extraction.choices(layout, options)
    assert choices is not None
    rows = search.rows_of([again_in(options) - search.extraction.memory.always])
    peak = request.evaluator(problem.mesh, layout, options).memory.peak
    assert peak - 20_000 < max(row.use(choices) for row in rows) <= peak + ROUNDING
