"""`search --refine`: never worse, best where everything can be tried, and said in the user's words."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.pricer import pricer
from layoutopt.optimize.evaluator import evaluate
from layoutopt.optimize.refine.improve import WORTH, RefineSearch
from layoutopt.optimize.refine.model_places import placed, places
from layoutopt.plan.build import Plan, parse_plan
from layoutopt.runtime.clock import Clock
from layoutopt.space.decisions import SearchSpace
from tests.layoutopt.models import random_model

PLAIN = {"storage": ("layout",), "recompute": (False,), "microbatches": (1,)}


def head(rows: int = 4095, width: int = 8192) -> mtf.Model:
    """Much data through a narrow product, then little through a wide one: of one axis, the first wants to
    split the batch and the second its weights."""
    g = mtf.Graph("head")
    batch, length = mtf.Dim("batch", 64), mtf.Dim("length", rows)
    d, wide, out = mtf.Dim("d", 512), mtf.Dim("wide", width), mtf.Dim("out", 512)
    x = g.input("x", [batch, length, d], "bfloat16")
    with g.scope("narrow"):
        w = g.variable("w", [d, out], mtf.Normal(0.1), activation_dtype="bfloat16")
        y = mtf.reduce_mean(mtf.relu(mtf.einsum([x, w], [batch, length, out])), length)
    with g.scope("wide"):
        up = g.variable("up", [out, wide], mtf.Normal(0.1), activation_dtype="bfloat16")
        down = g.variable("down", [wide, d], mtf.Normal(0.1), activation_dtype="bfloat16")
        y = mtf.einsum([mtf.relu(mtf.einsum([y, up], [batch, wide])), down], [batch, d])
    return mtf.Model(mtf.reduce_mean(mtf.square(y.cast("float32"))), mtf.SGD(0.1), name="head")


def searched(**more: Any) -> Plan:
    return layoutopt.search(head(), "all:8", hardware="a100", refine=True, **{**PLAIN, **more})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return searched()


def test_what_naming_costs(plan: Plan) -> None:
    found = plan.data.refinement
    assert found is not None and found.plain_status == "OPTIMAL"
    assert plan.layout.axes("batch") == ("all",) and dict(plan.layout.at("wide/einsum")) == {"wide": ("all",)}
    (only,) = found.renamings
    assert (
        only.names == {"batch2": "batch", "wide2": "wide"}
        and "wide" in only.where
        and "narrow" not in only.where
    )
    gain = found.plain_seconds - plan.predicted.step_seconds
    assert found.saves_seconds == pytest.approx(gain) == pytest.approx(only.saves_seconds)
    assert (
        only.words.startswith("renaming batch to batch2 (not split) in ")
        and "; wide to wide2 (over all) in wide: saves " in only.words
    )
    assert only.words in plan.data.notes


def test_the_plan_holds(plan: Plan) -> None:
    again = parse_plan(plan.to_json())
    assert again.layout == plan.layout and again.to_json() == plan.to_json()
    found = evaluate(head(), again.mesh, again.layout, load_hardware("a100"), again.options)
    assert found.cost.step_seconds == plan.predicted.step_seconds
    assert plan.solver.status == "FEASIBLE" and plan.solver.bound <= plan.predicted.step_seconds
    before = plan.alternatives[0]
    assert before.name == "no renaming" and not before.refined and before.predicted is not None
    assert before.predicted.step_seconds == plan.data.refinement.plain_seconds  # type: ignore[union-attr]


def test_rules_hold_in_every_place() -> None:
    assert not searched(pins="batch:all").layout.refined
    assert all(
        "all" not in dict(rules).get("wide", ()) for _, rules in searched(forbid="wide:all").layout.refined
    )


def test_no_less_memory_is_refined() -> None:
    with pytest.raises(mtf.UserError, match="with objective memory: refining reduces time, not memory"):
        searched(objective="memory")


def test_what_gains_nothing_changes_nothing() -> None:
    asked: dict[str, Any] = {"mesh": "all:2", "hardware": "a100", **PLAIN}
    plain = layoutopt.search(head(8, 8), **asked)
    found = layoutopt.search(head(8, 8), refine=True, **asked)
    assert found.layout == plain.layout and found.solver.status == "OPTIMAL"
    assert any(note.startswith("--refine: none of ") for note in found.data.notes)


def search_of(model: mtf.Model, mesh: mtf.Mesh, limit: float = math.inf) -> RefineSearch:
    prices = pricer(load_hardware("tpu-v3"), mesh)
    return RefineSearch(model, mesh, mtf.Options(), SearchSpace(microbatches=(1,)), prices, limit, Clock())


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 40))]
)
def test_random_models_are_never_slower(seed: int) -> None:
    model, mesh = random_model(seed), mtf.Mesh("x:2;y:2")
    search = search_of(model, mesh)
    start = mtf.Layout({"batch": "x"})
    found = search.best(start)
    now = evaluate(model, mesh, found, load_hardware("tpu-v3"))  # checked, too
    assert now.cost.step_seconds == search.fits(found) <= search.fits(start)
    tight = search_of(model, mesh, limit=search.peak(start))
    lean = tight.best(start)
    assert evaluate(model, mesh, lean, load_hardware("tpu-v3")).memory.peak <= tight.limit


def chain(sizes: tuple[int, ...]) -> mtf.Model:
    """Products one after the other, each in a scope of its own."""
    g = mtf.Graph("chain")
    batch, dims = mtf.Dim("batch", 64), [mtf.Dim(f"d{i}", n) for i, n in enumerate(sizes)]
    x = g.input("x", [batch, dims[0]], "float32")
    for i, (here, there) in enumerate(itertools.pairwise(dims)):
        with g.scope(f"layer_{i}"):
            x = mtf.tanh(mtf.einsum([x, g.variable("w", [here, there], mtf.Normal(0.1))], [batch, there]))
    return mtf.Model(mtf.reduce_mean(mtf.square(x)), mtf.SGD(0.1))


@pytest.mark.parametrize("sizes", [(64, 4096, 64), (4096, 64, 4096), (8192, 8192, 32), (32, 8192, 8192)])
def test_against_enumeration(sizes: tuple[int, ...]) -> None:
    """Every placement of every layer over one axis: the least of all is found."""
    model, mesh = chain(sizes), mtf.Mesh("x:4")
    search, every = search_of(model, mesh), search_of(model, mesh)
    found = {p: place for p, place in places(model.step_graph).by_path.items() if p.startswith("layer")}
    start = mtf.Layout({"batch": "x"})
    choices = [
        [{n: (("x",) if n == to else ()) for n in p.dims} for to in (None, *p.dims)] for p in found.values()
    ]
    least = math.inf
    for rules in itertools.product(*choices):
        layout = start
        for path, here in zip(found, rules, strict=True):
            layout = placed(layout, path, here)
        least = min(least, every.fits(layout))
    assert search.fits(search.best(start)) <= least * (1 + 4 * WORTH)
