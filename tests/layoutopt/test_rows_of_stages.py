"""Rows of memory of pipelines hold what the evaluator counts."""

from __future__ import annotations

import pytest

from examples.moe_lm import model as mixture
from layoutopt.optimize.heuristics.incumbents import WarmStart
from layoutopt.optimize.problems.question import Limits, SearchQuestion
from layoutopt.optimize.problems.subproblem import ROUNDING, SubproblemSearch
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.recompute import again_in
from layoutopt.space.splits import Split
from layoutopt.space.undivided import stored_at
from mesh_tf_core.ir.layout import Layout
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", (frozenset(), frozenset({Recomputed("layers")})))
def test_rows_of_stages_with_experts(policy: Policies) -> None:
    """The part of a stack that a stage has lies in its memory, also where storage makes that a copy."""
    where = {"mesh": MESH, "hardware": "h100", "framework": "megatron", "devices": None, "objective": "time"}
    question = SearchQuestion.of(MODEL, where, SPACE, Limits(), None)
    request, start = question.request, WarmStart(question.request, question.shapes)
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
