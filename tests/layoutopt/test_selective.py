"""Loops that keep some of their values when they run again, as the search decides: tables add up to the price
of the program, and rows count no more than its peak."""

from __future__ import annotations

import math
import random

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.pricer import pricer
from layoutopt import search
from layoutopt.cli.given import OnMesh
from layoutopt.formulation.extract import Extraction, extract
from layoutopt.optimize.evaluation.evaluation import as_run
from layoutopt.optimize.evaluation.evaluator import Evaluator, evaluate
from layoutopt.optimize.problems import subproblem
from layoutopt.optimize.problems.subproblem import SubproblemSearch
from layoutopt.solver import evaluate as value_of
from layoutopt.space.decisions import SearchSpace, decisions
from layoutopt.space.recompute import again_in, check_named
from layoutopt.space.splits import parse_rules
from mesh_tf_core.lower.remat_policy import Recomputed
from tests.layoutopt.models import EXAMPLES, some_choices

PRICE = 1e-9
ROUNDING = 1 + 1e-12
EVERY = (False, "selective", True)


def extraction(
    name: str, mesh: mtf.Mesh, parts: int, hardware: str, allowed: tuple[bool | str, ...] = EVERY
) -> Extraction:
    hardware, _, framework = hardware.partition("/")
    machine = load_hardware(hardware, framework or None)
    model = as_run(EXAMPLES[name](), machine)
    graph = model.training_step(parts).graph
    decided = decisions(graph, mesh, SearchSpace(microbatches=(parts,), recompute=allowed))
    return extract(model, mesh, decided, pricer(machine, mesh))


def compare(
    name: str, on: str, parts: int, hardware: str, count: int, allowed: tuple[bool | str, ...] = EVERY
) -> None:
    chip, _, framework = hardware.partition("/")
    model, mesh, machine = EXAMPLES[name](), mtf.Mesh(on), load_hardware(chip, framework or None)
    found, rng, compared = extraction(name, mesh, parts, hardware, allowed), random.Random(parts), 0
    while compared < count:
        layout, options = found.decided.read(some_choices(found.decided, rng))
        choices = found.choices(layout, options)
        try:
            evaluation = evaluate(model, mesh, layout, machine, options)
        except mtf.LayoutError:
            assert choices is None
            continue
        assert choices is not None
        objective = value_of(found.problem, choices).objective
        assert objective == pytest.approx(evaluation.cost.step_seconds, rel=PRICE), (layout, options)
        rows = found.memory.rows() + found.memory.rows(again_in(options))
        counted = max(row.use(choices) for row in rows)
        assert counted <= evaluation.memory.peak * ROUNDING, (layout, options)
        assert found.read(choices) == (layout, options)
        compared += 1


def test_a_transformer() -> None:
    compare("transformer with fused attention", "data:2;model:2", 2, "tpu-v3", 8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hardware", ["a100/megatron", "h100/torch:checkpoint=whole"])
def test_second_runs_to_the_end(hardware: str) -> None:
    modules = ("keep=products-feed_forward+others-feed_forward+attention", *EVERY)
    compare("transformer with fused attention", "data:2;model:2", 2, hardware, 8, modules)


@pytest.mark.nightly
def test_sets_of_ones_own() -> None:
    """Names of weights and scopes; what keeps the same as an earlier set is no other option."""
    named = ("keep=wi+attention", "keep=feed_forward/wi+attention", "keep=k+q")
    compare("transformer", "x:4", 1, "a100", 4, named)
    graph = EXAMPLES["transformer"]().step_graph
    found = decisions(
        graph, mtf.Mesh("x:2"), SearchSpace(recompute=(False, *named, True), microbatches=(1,))
    ).options
    assert found["recompute layers"] == ((), ("on", "attention", "wi"), ("on", "k", "q"), ("on",))
    with pytest.raises(mtf.UserError, match="have no values of kind or scope 'wy'") as refused:
        check_named(graph, ["keep=wy+attention"])
    assert "\n" not in str(refused.value)
    typed = OnMesh(keep="wi+attention, q+k").space().recompute
    assert typed == (False, True, "keep=wi+attention", "keep=q+k")
    with pytest.raises(mtf.UserError, match="a set such as 'keep=attention"):
        layoutopt.search(EXAMPLES["transformer"](), mesh="x:2", recompute=["sometimes"])


def test_what_a_weight_is_gathered_from_is_dead_beside_an_operation_that_gathers_it_further() -> None:
    """The taps of a convolution, stored split further (zero3) and split by the layout."""
    compare("strided", "data:2;model:4", 1, "tpu-v5e", 20)


@pytest.mark.nightly
@pytest.mark.parametrize("hardware", ["tpu-v5e", "a100", "cpu-local"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str, hardware: str) -> None:
    for parts, mesh in ((2, "x:4"), (1, "data:2;model:4")):
        compare(name, mesh, parts, hardware, 20)


@pytest.mark.nightly
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.one_in(2)
def test_some_of_the_layers(parts: int) -> None:
    compare("transformer", "data:2;model:2", parts, "tpu-v3", 6, ("some", True))


def test_what_is_decided() -> None:
    def options(name: str, loop: str) -> list[str]:
        graph = EXAMPLES[name]().step_graph
        found = decisions(graph, mtf.Mesh("x:2"), SearchSpace(recompute=EVERY, microbatches=(1,))).options[
            f"recompute {loop}"
        ]
        return ["+".join(choice[1:]) if choice else "-" for choice in found]

    kept = ["outputs", "attention", "outputs+attention", "products", "products+attention", "products+others"]
    assert options("transformer", "layers") == ["-", *kept, ""]
    # Its widening product alone is read again.
    assert options("reformer", "ff_chunks") == ["-", "products", ""]
    assert options("branching", "step_1") == ["-", ""]


def test_the_rows_of_what_is_kept_reach_the_peak() -> None:
    name, mesh, on = "transformer with fused attention", mtf.Mesh("data:2;model:2"), "tpu-v3"
    found, gathers = extraction(name, mesh, 1, on), mtf.Layout("d_kv:model")
    tensor = mtf.Layout("batch:data;d_ff:model;heads:model")
    for keep, layout in (
        ("outputs", tensor),
        ("products", tensor),
        ("products+attention", tensor),
        ("products+others", gathers),
    ):
        options = mtf.Options(recompute=frozenset({f"layers:keep={keep}"}))
        again = again_in(options)
        choices = found.choices(layout, options)
        assert choices is not None
        peak = evaluate(EXAMPLES[name](), mesh, layout, load_hardware(on), options).memory.peak
        assert max(row.use(choices) for row in found.memory.rows(again)) == peak
        other = found.choices(layout, mtf.Options(recompute=frozenset({"layers"})))
        assert other is not None
        assert max(row.use(other) for row in found.memory.rows(again)) <= peak


def test_every_set_that_is_too_large_is_seen_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only second runs that keep nothing fit: the search learns what each set that loops could keep needs,
    however few answers it may try, and proves the rest."""
    monkeypatch.setattr(subproblem, "CELLS", 0)
    model, mesh, machine = EXAMPLES["transformer with fused attention"](), mtf.Mesh("one:1"), "tpu-v5e"
    plain = mtf.Options(recompute=frozenset({"layers"}))
    peak = evaluate(model, mesh, mtf.Layout(""), load_hardware(machine), plain).memory.peak
    asked = {"recompute": EVERY, "microbatches": (1,), "storage": ("layout",), "alternatives": False}
    plan = search(model, mesh, hardware=machine, memory=peak, **asked)  # type: ignore[arg-type]
    assert plan.options.recompute == {Recomputed("layers")} and plan.solver.status == "OPTIMAL"


TENSOR = "batch:data;d_ff:model;heads:model;vocab:model;length:none;memory_length:none;positions:none"


def fastest_within(limit: float) -> tuple[float, float, bool]:
    """Seconds and bound of the best layout that holds so much, and whether it is proven."""
    name, mesh, machine = "transformer with fused attention", mtf.Mesh("data:2;model:2"), "tpu-v3"
    evaluator = Evaluator(EXAMPLES[name](), load_hardware(machine))
    graph = evaluator.model.step_graph
    asked = {"pins": parse_rules(TENSOR), "storage": ("layout", "zero3"), "microbatches": (1,)}
    decided = decisions(graph, mesh, SearchSpace(recompute=EVERY, **asked))  # type: ignore[arg-type]
    outcome = SubproblemSearch.whole(evaluator, mesh, decided).fastest(limit)
    return (outcome.found.seconds if outcome.found else math.inf), outcome.bound, outcome.proven


@pytest.mark.nightly
def test_one_set_after_the_other_finds_what_all_at_once_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within limits that bind: the rows of all sets at once, and of each alone. A bound of a set that is too
    high is found out."""
    limits = (95_000.0, 150_000.0)
    each = [fastest_within(limit) for limit in limits]
    assert len({seconds for seconds, *_ in each}) > 1
    with monkeypatch.context() as patch:
        patch.setattr(subproblem, "SETS", 0)
        at_once = [fastest_within(limit) for limit in limits]
    for (seconds, bound, proven), other in zip(each, at_once, strict=True):
        assert proven and (seconds, bound) == pytest.approx(other[:2], rel=PRICE)
    true = subproblem.marginals
    monkeypatch.setattr(subproblem, "marginals", lambda *asked: [2 * costs[::-1] for costs in true(*asked)])
    assert [fastest_within(limit) for limit in limits] != each
