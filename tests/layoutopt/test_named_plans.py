"""Plans by name: each is within its definition, and the best that enumeration finds there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples.moe_lm import model as mixture
from examples.resnet import model as resnet
from layoutopt.analysis.lint import lint
from layoutopt.optimize.entry import search
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.optimize.heuristics.baselines import Baselines
from layoutopt.optimize.heuristics.best_plans import FAR
from layoutopt.plan.build import Plan, options_of
from layoutopt.plan.schema import Alternative
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.parallelism import parallelism
from tests.layoutopt.models import SMALL, crossed, transformer
from tests.marks import by_day

V3 = load_hardware("tpu-v3")
AGREE = 1e-6
MIXTURE = {**SMALL, "layers": 2, "experts": 4, "d_ff": 64}
ASKED: dict[str, Any] = {"storage": ("layout", "zero3"), "microbatches": (1,)}
LABELS = ("data parallel", "fully sharded (FSDP)", "tensor parallel")
MODELS: dict[str, Callable[[], mtf.Model]] = {
    "two layers": lambda: two_layers(),
    "transformer": lambda: transformer(**{**SMALL, "layers": 2, "positions": "none"}),
    "mixture": lambda: mixture(**{**MIXTURE, "positions": "none"}),
}


def two_layers(batch: int = 64, d: int = 64, f: int = 256) -> mtf.Model:
    g = mtf.Graph("two_layers")
    rows, inner, outer = mtf.Dim("batch", batch), mtf.Dim("d", d), mtf.Dim("f", f)
    x = g.input("x", [rows, inner], "float32")
    v, w = g.variable("v", [inner, outer], mtf.Normal(0.1)), g.variable("w", [outer, inner], mtf.Normal(0.1))
    y = mtf.einsum([mtf.gelu(mtf.einsum([x, v], [rows, outer])), w], [rows, inner])
    return mtf.Model(mtf.reduce_mean(mtf.square(y)), mtf.Adam(0.1))


def named(plan: Plan, name: str) -> Alternative:
    (found,) = [a for a in plan.alternatives if a.name == name]
    return found


def split(found: Alternative) -> dict[str, tuple[str, ...]]:
    return {name: tuple(axes) for name, axes in found.layout.items() if axes}


def test_the_graph_says_what_a_dimension_is() -> None:
    text, moe, images = (
        parallelism(transformer(**SMALL)),
        parallelism(mixture(**MIXTURE)),
        parallelism(resnet()),
    )
    assert (text.data, text.experts) == (("batch",), ())
    # Attention needs all of d_kv, and nobody splits what the inputs have.
    assert {"vocab", "d_ff", "heads", "d_model"} == set(text.weights)
    assert {"d_ff", "heads"} == set(text.inner) == set(moe.inner)  # neither the ends nor the residual
    assert {"length", "memory_length", "positions"} == set(text.sequence)
    assert (moe.data, moe.experts) == (("batch", "expert_batch"), ("experts",))
    assert images.sequence == ("height", "width") and "channels" in images.weights
    assert not text.apart("d_ff", ["d_model"]) and text.apart("d_ff", ["vocab", "d_ff"])


def test_names_are_of_no_matter() -> None:
    g = mtf.Graph("other_names")
    rows, a, b = mtf.Dim("d_model", 8), mtf.Dim("batch", 16), mtf.Dim("length", 32)
    x = g.input("x", [rows, a], "float32")
    v, w = g.variable("v", [a, b], mtf.Normal(0.1)), g.variable("w", [b, a], mtf.Normal(0.1))
    y = mtf.einsum([mtf.gelu(mtf.einsum([x, v], [rows, b])), w], [rows, a])
    found = parallelism(mtf.Model(mtf.reduce_mean(mtf.square(y)), mtf.Adam(0.1)))
    assert (found.data, found.sequence, set(found.weights)) == (("d_model",), (), {"length"})


def every_plan(
    model: mtf.Model, mesh: mtf.Mesh, label: str, most: int, asked: dict[str, Any] = ASKED
) -> list[tuple[float, int]]:
    """Seconds and peaks of all plans of a name with one microbatch, stored as the layout says or split."""
    points = []
    for each in Baselines(model, mesh).plans()[label]:
        decided = each.decided(SearchSpace(**asked), 1)
        if decided is None:
            continue
        assert math.prod(map(len, decided.options.values())) <= most, label
        for picked in itertools.product(*decided.options.values()):
            layout, options = decided.read(dict(zip(decided.options, picked, strict=True)))
            with suppress(mtf.LayoutError):
                found = evaluate(model, each.mesh, layout, V3, options)
                if not each.split or any(layout.axes(n) for n in each.split):
                    points.append((found.cost.step_seconds, found.memory.peak))
    return points


@pytest.mark.one_in(2)
@pytest.mark.parametrize("label", by_day([*LABELS, "data + tensor parallel"]))
def test_the_best_of_a_name_is_what_enumeration_finds(label: str) -> None:
    model, mesh = MODELS["two layers"](), mtf.Mesh("x:2;y:2")
    points = every_plan(model, mesh, label, 300)
    peaks = sorted(peak for _, peak in points)
    for limit in (math.inf, peaks[len(peaks) // 3], peaks[0], peaks[0] - 1):
        try:
            plan = search(model, mesh=mesh, hardware=V3, memory=limit, **ASKED)
        except mtf.InfeasibleError:
            continue
        best = named(plan, label)
        fits = [seconds for seconds, peak in points if peak <= limit]
        assert best.predicted is not None and best.feasible <= bool(fits)
        if not best.feasible and fits:  # what is hopeless is not looked at further
            assert min(seconds for seconds, _ in points) >= FAR * plan.predicted.step_seconds
        never = [n for n in plan.data.notes if ": no variant fits" in n or ": skipped" in n]
        assert any(label in n for n in never) == (not best.feasible)
        if fits and min(fits) < FAR * plan.predicted.step_seconds:
            assert best.predicted.step_seconds <= min(fits) * (1 + AGREE)


def test_named_plans_split_elsewhere_what_a_search_may() -> None:
    """Sequence parallelism, of a dimension that counts rows here: only over the axes of weights."""
    model, mesh, label = two_layers(4096, 512, 512), mtf.Mesh("x:4"), "tensor parallel"
    further = {**ASKED, "elsewhere": ("batch",)}
    plain, wide = (search(model, mesh=mesh, hardware=V3, **asked) for asked in (ASKED, further))
    best = named(wide, label)
    assert best.predicted is not None and mtf.Layout(best.layout).axes("batch") == ()
    least = min(seconds for seconds, _ in every_plan(model, mesh, label, 1000, further))
    assert best.predicted.step_seconds == pytest.approx(least, rel=AGREE)
    assert least < named(plain, label).predicted.step_seconds  # type: ignore[union-attr]
    assert best.refined["elsewhere"] == {"batch": ["x"]} and not named(wide, "data parallel").refined
    assert not any("searched without" in note for note in wide.data.notes)


@pytest.mark.parametrize(("name", "where"), crossed([{"mesh": "x:2;y:2"}, {"devices": 4}], MODELS, every=3))
def test_every_plan_is_legal_within_its_definition_and_not_better(name: str, where: dict[str, Any]) -> None:
    model = MODELS[name]()
    dims = parallelism(model)
    plan = search(model, hardware=V3, microbatches=(1, 2), **where)
    for each in plan.alternatives:
        mesh, own = mtf.Mesh(each.mesh), split(each)
        assert mesh.devices == plan.mesh.devices
        judged = evaluate(model, mesh, mtf.Layout(each.layout), V3, options_of(each))
        assert each.predicted == judged.predicted
        if each.feasible and "devices" in where:
            assert judged.cost.step_seconds >= plan.predicted.step_seconds * (1 - AGREE)
        if each.name in LABELS[:2]:
            assert own == dict.fromkeys(dims.data, mesh.names)
            stages = {
                each.storage.get(v.name, "layout") for v in model.graph.variables.values() if v.trainable
            }
            assert stages == {"zero3"} if each.name == LABELS[1] else "zero3" not in stages
        if each.name == "tensor parallel":
            assert own and own.keys() <= {*dims.weights} and set(own.values()) == {mesh.names}
            assert own.keys() & {*dims.inner}
        if each.name == "data + tensor parallel":
            data, rest = own.pop(dims.data[0]), {axes for n, axes in own.items() if n not in dims.data}
            assert {own.pop(n) for n in dims.data[1:]} <= {data}
            assert rest and not {*data} & {a for axes in rest for a in axes}
            assert {*data} | {a for axes in rest for a in axes} == {*mesh.names}
            assert own.keys() & {*dims.inner}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(3)
def test_what_splits_data_has_nothing_to_lint_but_what_its_name_says(name: str) -> None:
    model = MODELS[name]()
    plan = search(model, mesh="x:4", hardware=V3, **ASKED)
    for label in LABELS[:2]:
        found = named(plan, label)
        judged = evaluate(model, mtf.Mesh(found.mesh), mtf.Layout(found.layout), V3, options_of(found))
        kinds = {f.kind for f in lint(model, judged, V3, options_of(found))} - {"no kernel"}
        assert kinds <= ({"repeated memory"} if label == LABELS[0] else set())


def test_one_axis_is_rearranged_for_what_needs_two() -> None:
    plan = search(two_layers(), mesh="x:4", hardware=V3, **ASKED)
    assert named(plan, "data + tensor parallel").mesh == {"data": 2, "model": 2}
    assert named(plan, "fully sharded (FSDP)").mesh == {"x": 4}
    shapes = search(two_layers(), devices=4, max_axes=1, hardware=V3, **ASKED)
    assert "data + tensor parallel" not in {a.name for a in shapes.alternatives}


@pytest.mark.nightly
def test_a_batch_for_half_the_devices_leaves_the_rest_to_the_sequence() -> None:
    model = transformer(**{**SMALL, "layers": 2, "batch": 2})
    plan = search(model, mesh="x:2;y:2", hardware=V3, **ASKED)
    assert not {*LABELS[:2]} & {a.name for a in plan.alternatives}
    for label in ("data + context parallel", "FSDP + context parallel"):
        found = named(plan, label)
        own = split(found)
        assert len(own["batch"]) == 1
        assert {a for n, axes in own.items() if n in parallelism(model).sequence for a in axes} == {
            *found.mesh
        } - {*own["batch"]}


def test_a_plan_on_another_mesh_that_is_faster_is_pointed_out() -> None:
    model, pins = two_layers(4096, 1024, 4096), "batch:none;d:none;f:none"
    plan = search(model, mesh="x:4", hardware=V3, pins=pins, **ASKED)
    found = named(plan, "data + tensor parallel")
    assert found.predicted and found.predicted.step_seconds < plan.predicted.step_seconds
    (note,) = [n for n in plan.data.notes if "use --devices 4" in n]
    assert note.startswith("data + tensor parallel on data:2;model:2 is faster than the best layout on x:4")


@pytest.mark.parametrize(
    ("batch", "asked", "what"),
    [
        (64, {"storage": ("zero3",)}, "--storage layout"),
        (64, {"microbatches": (4,)}, "--microbatches 1"),
        (4096, {"pins": "f:x"}, "splits other than those of --pin"),
    ],
)
def test_a_plan_by_name_that_is_faster_says_what_was_not_allowed(
    batch: int, asked: dict[str, Any], what: str
) -> None:
    plan = search(two_layers(batch), mesh="x:4", hardware=V3, **{**ASKED, **asked})
    seconds = plan.predicted.step_seconds * (1 - AGREE)
    faster = [a.name for a in plan.alternatives if a.predicted and a.predicted.step_seconds < seconds]
    (note,) = [n for n in plan.data.notes if n.startswith("faster than the best layout found")]
    said, _, listed = note.partition(": ")
    assert said == f"faster than the best layout found, but with {what}, which the search did not allow"
    assert {*listed.split(", ")} <= {*faster}


@pytest.mark.nightly
def test_fsdp_of_a_mixture_is_as_good_as_in_practice() -> None:
    model = mixture(
        layers=12,
        d_model=1024,
        d_kv=64,
        heads=16,
        d_ff=4096,
        experts=16,
        vocab=32000,
        batch=64,
        length=1024,
        dtype="bfloat16",
    )
    plan = search(model, mesh="x:8", hardware="tpu-v4", microbatches=(1,))
    found = named(plan, "fully sharded (FSDP)")
    assert found.predicted is not None and split(found).keys() == {"batch", "expert_batch"}
    assert 1 <= found.predicted.step_seconds / plan.predicted.step_seconds < 1.3
