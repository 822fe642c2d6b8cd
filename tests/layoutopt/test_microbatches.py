"""More microbatches: what the bound that rules them out says, and that it rules out nothing better."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from costmodels.hardware import load_hardware
from examples.mlp import model as mlp
from examples.transformer_lm import model as transformer
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.bounds import EXACT, SLACK
from layoutopt.optimize.problems.subproblems import Subproblem, subproblems
from layoutopt.optimize.proof.fixing import faster
from layoutopt.space.decisions import KINDS, SearchSpace, decisions
from layoutopt.space.diloco import Rarely
from layoutopt.space.kind import HYBRID, Decision, Target
from layoutopt.space.microbatches import USUAL, Microbatches, usual
from layoutopt.space.storage import Storage
from mesh_tf_core.errors import InfeasibleError, LayoutError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.storage import ONCE, STAGES
from tests.layoutopt.every_kind import OPENED, opened, some_machine, whole_model
from tests.layoutopt.models import EXAMPLES, some_choices, towers
from tests.marks import by_day
from tests.searching import search


def bound(name: str, mesh: Mesh, parts: int, hardware: str) -> float:
    """No layout of an example takes fewer seconds with so many microbatches."""
    model = EXAMPLES[name]()
    graph = model.training_step(parts).graph
    decided = decisions(graph, mesh, SearchSpace(microbatches=(parts,)))
    return Subproblem.of(mesh, decided).opened(Evaluator(model, load_hardware(hardware))).relaxed()


@pytest.mark.parametrize(
    ("name", "hardware"),
    by_day([("mlp", "tpu-v6e"), ("transformer in bfloat16", "tpu-v3"), ("transformer", "a100")], every=3),
)
def test_pieces_of_a_batch_take_no_less_time(name: str, hardware: str) -> None:
    mesh = Mesh("data:2;model:2")
    bounds = [bound(name, mesh, parts, hardware) for parts in (1, 4)]
    assert bounds == sorted(bounds)


def compare_with_fewer(seed: int, problems: int, layouts: int) -> int:
    """Layouts of every kind of decision that are legal with more microbatches are legal with fewer, and take
    no less than the bound that follows from these; returns how many were compared."""
    rng, model, compared = random.Random(seed), whole_model(seed), 0
    mesh = Mesh(rng.choice(["x:2;y:2", "x:4"]))
    evaluator = Evaluator(model, some_machine(rng))
    allowed = opened(rng, model).but(microbatches=(1, 2, 4))
    every = (p for p in subproblems(model, [mesh], allowed, evaluator.near) if not p.refused)
    more = [each for each in every if each.fewer]
    for each in rng.sample(more, min(problems, len(more))):
        for _ in range(layouts):
            layout, options = each.decided.read(some_choices(each.decided, rng))
            try:
                seconds = evaluator(mesh, layout, options).cost.step_seconds
            except LayoutError:
                continue
            for other in each.fewer:
                less = evaluator(mesh, layout, replace(options, microbatches=other.microbatches))
                bound = less.cost.step_seconds
                assert bound <= seconds * (1 + SLACK) or not evaluator.prices(mesh).pieces_cost_more
                compared += 1
    return compared


@pytest.mark.parametrize("seed", by_day(range(8), every=8))
def test_what_is_legal_with_more_is_legal_with_fewer(seed: int) -> None:
    assert compare_with_fewer(seed, 2, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 200, 10))
def test_many_layouts_are_legal_with_fewer(first: int) -> None:
    assert sum(compare_with_fewer(seed, 4, 6) for seed in range(first, first + 10)) > 100


PARTS = (1, 4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_an_option_with_more_is_one_with_fewer(kind: type[Decision]) -> None:
    """Also each value alone: what bounds an option is that option with fewer."""
    model, mesh = whole_model(1), Mesh("x:2;y:2" if kind is not Rarely else "x:2;sites:2")
    fields = {**kind.everything(Target(model, mesh)), **OPENED[kind](random.Random(1), model)}
    fields |= {"storage": (*STAGES, HYBRID)} if kind is Storage else {}
    staged = {"pipeline": ("layers",)} if kind.needs else {}
    alone = [{n: (v,)} for n, values in fields.items() if isinstance(values, tuple) for v in values]
    for said in (fields, *alone):
        space = SearchSpace(**{**staged, **said, "microbatches": (1, 2, 4)})
        every = [p for p in subproblems(model, [mesh], space) if not p.refused]
        for each, fewer in [(p, less) for p in every for less in p.fewer if not less.refused]:
            for d in each.decided.every:
                its = () if isinstance(d, Microbatches) else d.options
                assert {*its} <= {*fewer.decided.options.get(d.name, its)}, (said, d.name)


SAID = (*STAGES, *(f"layout,{stage}" for stage in STAGES[1:]), f"{ONCE},{HYBRID}")


@pytest.mark.parametrize("stages", by_day(SAID, every=4))
@pytest.mark.one_in(3)
def test_several_numbers_are_the_best_of_each(stages: str) -> None:
    """Where the sum of gradients costs more than the products, which stage adds up when decides."""
    sizes = {"layers": 4, "d_model": 1024, "d_kv": 128, "heads": 8, "d_ff": 4096, "vocab": 256}
    model = transformer(**sizes, batch=64, length=64)
    asked: dict[str, Any] = {
        "mesh": "data:8",
        "hardware": "tpu-v3",
        "pins": "batch:data",
        "storage": stages,
        "recompute": "never",
        "context": "gather",
        "allow": "usual",
    }
    together = search(model, **asked, microbatches=(1, 2))
    alone = [search(model, **asked, microbatches=[m]) for m in (1, 2)]
    assert together.solver.status == "OPTIMAL"
    assert together.predicted.step_seconds == min(plan.predicted.step_seconds for plan in alone)
    assert {*together.options.storage.values()} or "layout" in stages, "widened"


BY_RANK = {
    (480, 48): (1, 2, 5, 10, 20, 40),
    (480, 32): (1, 3, 5, 15, 30),
    (12, 4): (1, 3, 6, 12),
    (45, 9): (1, 5),
    (7, 7): USUAL,
    (64, 48): USUAL,
    (1000, 1): (1, 2, 4, 8, 20, 40),
}
"""(batch, devices) -> the numbers that a search considers by default."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("batch", "devices"), BY_RANK)
def test_the_usual_numbers_follow_what_a_rank_has(batch: int, devices: int) -> None:
    model, on = mlp(batch=batch, hidden=8, layers=1), {"hardware": "tpu-v3", "allow": "usual"}
    plan = search(model, mesh=f"data:{devices}", **on, memory=math.inf, alternatives=False)
    assert plan.question.microbatches == BY_RANK[batch, devices]
    given = search(model, mesh=f"data:{devices}", **on, microbatches=USUAL, alternatives=False)
    assert given.question.microbatches == USUAL, "somebody asked for these"


def test_the_usual_numbers_follow_the_ranks_of_the_batch() -> None:
    """Not the devices: the pin of the batch, or stages, tell how many ranks share it."""
    asked = {"hardware": "tpu-v3", "allow": "usual", "memory": math.inf, "alternatives": False}
    built = mlp(batch=480, hidden=48, layers=1)
    pinned = search(built, mesh="a:4;b:12", pins="batch:b;hidden:a", **asked)
    assert pinned.question.microbatches == usual(built, 12) != usual(built, 48)
    layers = transformer(layers=2, batch=24, length=8, d_model=16, d_ff=32, heads=2, d_kv=8, vocab=16)
    staged = search(layers, mesh="pipe:2;data:2", pins="layers:pipe", storage="layout", **asked)
    assert staged.question.microbatches == usual(layers, 2) != usual(layers, 4)
    assert staged.question.by_ranks
    assert not search(built, mesh="a:8", **asked, microbatches=(1, 3)).question.by_ranks


def test_the_bound_rules_out_nothing_better() -> None:
    model = EXAMPLES["mlp"]()
    asked: dict[str, Any] = {"mesh": "data:4", "hardware": "tpu-v3"}
    limit = 0.7 * search(model, **asked).predicted.peak_memory_bytes
    together = search(model, **asked, memory=limit, microbatches=PARTS)
    alone = [search(model, **asked, memory=limit, microbatches=[m]) for m in PARTS]
    assert together.solver.status == "OPTIMAL"
    assert together.predicted.step_seconds == min(plan.predicted.step_seconds for plan in alone)


@pytest.mark.nightly
def test_options_that_take_too_long_are_not_tried_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option that is left out takes longer in all layouts of both numbers than the answer."""
    model, asked = EXAMPLES["mlp"](), list[Subproblem]()
    on: dict[str, Any] = {"mesh": "data:2;model:2", "hardware": "tpu-v3", "microbatches": PARTS}

    def heard(evaluator: Evaluator, subproblem: Subproblem, *given: Any, **named: Any) -> object:
        asked.append(subproblem)
        return faster(evaluator, subproblem, *given, **named)

    monkeypatch.setattr("layoutopt.optimize.driver.fastest.faster", heard)
    plan = search(model, memory=0.7 * search(model, **on).predicted.peak_memory_bytes, **on)
    assert plan.solver.status == "OPTIMAL"
    last = asked[-1]
    assert last.microbatches == PARTS[-1]
    graph = model.training_step(PARTS[-1]).graph
    every = decisions(graph, last.mesh, SearchSpace(microbatches=PARTS[-1:]))
    left_out = [(n, o) for n in every.free for o in every.options[n] if o not in last.decided.options[n]]
    assert left_out
    for name, option in left_out:
        within = every.within({name: [option]})
        relaxed = Subproblem.of(last.mesh, within).opened(Evaluator(model, load_hardware("tpu-v3"))).relaxed()
        assert relaxed >= plan.predicted.step_seconds * (1 - EXACT)


def test_variables_that_are_too_large_need_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "layoutopt.optimize.driver.fastest.faster", lambda *_, **__: pytest.fail("tables were made")
    )
    model = EXAMPLES["mlp"]()
    least = sum(v.bytes for v in model.step_graph.variables.values()) // 4
    asked: dict[str, Any] = {"mesh": "data:2;model:2", "hardware": "tpu-v3", "microbatches": [1]}
    with pytest.raises(
        InfeasibleError, match=r"no layout of 'mlp' fits into .*\nthe layout with the least memory"
    ):
        search(model, memory=least - 1, alternatives=True, **asked)


def test_what_a_model_cannot_be_split_into_is_not_searched() -> None:
    plan = search(towers("float32"), mesh="data:4", hardware="h100")
    assert plan.solver.status == "OPTIMAL" and plan.options.microbatches == 1
    (note,) = (n for n in plan.data.notes if "was not searched" in n)
    assert (
        note.startswith("--microbatches 2,4,8 was not searched (")
        and "examples of different microbatches cannot" in note
    )


def test_only_numbers_that_a_model_cannot_be_split_into_are_refused() -> None:
    with pytest.raises(
        UserError, match="but examples of different microbatches cannot be combined; use one microbatch"
    ):
        search(towers("float32"), mesh="data:4", hardware="h100", microbatches=(2, 4))
