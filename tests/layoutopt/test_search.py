"""What a search answers, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from functools import partial
from pathlib import Path

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples.mlp import model as mlp
from examples.transformer_lm import model as transformer
from layoutopt import Plan, load_plan, search
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.plan.build import check_plan_model
from tests.layoutopt.models import EXAMPLES

MESH = "data:2;model:2"
PLAIN = {"storage": ("layout",), "recompute": (False,), "microbatches": (1,)}


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return EXAMPLES["mlp"]()


def small(model: mtf.Model, **asked: object) -> Plan:
    return search(model, **{"mesh": MESH, "hardware": "tpu-v3", "alternatives": False, **PLAIN, **asked})  # type: ignore[arg-type]


def test_infeasible_names_the_largest_tensors(model: mtf.Model) -> None:
    with pytest.raises(mtf.InfeasibleError) as caught:
        small(model, memory=5000, alternatives=True)
    said = str(caught.value)
    assert "no layout of 'mlp' fits into 4.88 KiB per device" in said
    assert "its largest tensors: " in said and "variable layer_0/weight" in said
    asked, least, why = said.splitlines()
    assert asked.endswith("per device") and least.startswith("the layout with the least memory needs ")
    assert why.startswith("its largest tensors: ") and len(said) < 450
    assert mtf.InfeasibleError.exit_code == 3


def test_pins_are_honoured(model: mtf.Model) -> None:
    assert small(model, pins="hidden_1:model").layout.axes("hidden_1") == ("model",)
    assert small(model, pins="batch:none").layout.axes("batch") == ()
    both = small(model, pins={"batch": ("data", "model")})
    assert both.layout.axes("batch") == ("data", "model")


PINNED = ("batch:rows", "batch:rows;hidden_1:columns", "batch:rows+columns", "hidden_1:x;batch:y;hidden:z")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pins", PINNED)
def test_pins_name_axes_of_a_searched_mesh(model: mtf.Model, pins: str) -> None:
    """The best of all meshes of 8 devices that have the axes, which keep their names."""
    names = mtf.Layout(pins).written
    axes = tuple(dict.fromkeys(axis for found in names.values() for axis in found))
    found = small(model, mesh=None, devices=8, pins=pins, max_axes=max(2, len(axes)))
    assert {*axes} <= {*found.mesh.names} and found.solver.proven
    assert all(found.layout.axes(dim) == over for dim, over in names.items())
    best = []
    for shape in [(8,), (2, 4), (4, 2), *([(2, 2, 2)] if axes[2:] else [])]:
        for places in itertools.permutations(range(len(shape)), min(len(axes), len(shape))):
            if len(axes) > len(shape):
                continue
            called = dict(zip(places, axes, strict=True))
            mesh = mtf.Mesh([(called.get(i, f"other{i}"), n) for i, n in enumerate(shape)])
            with contextlib.suppress(mtf.UserError):  # sizes that the pins do not suit
                best.append(small(model, mesh=mesh, pins=pins).predicted.step_seconds)
    assert found.predicted.step_seconds == pytest.approx(min(best), rel=1e-9)


def test_pins_of_layers_ask_for_stages() -> None:
    built = transformer(layers=4, batch=8, length=16, d_model=64, d_ff=128, heads=4, d_kv=16, vocab=64)
    asked = {"mesh": None, "devices": 8, "microbatches": (2,), "allow": ("usual",), "orders": "mesh"}
    found = small(built, **asked, pins="layers:pipe")
    assert found.layout.axes("layers") == ("pipe",) and found.mesh.size("pipe") in (2, 4)
    again = small(built, **{**asked, "devices": None, "mesh": found.mesh}, pins="layers:pipe")
    assert again.predicted.step_seconds == pytest.approx(found.predicted.step_seconds, rel=1e-9)
    with pytest.raises(
        mtf.UserError, match=r"name 4 axes \(a, b, c, d\), but no mesh of 8 devices has as many"
    ):
        small(built, **asked, pins="batch:a+b+c+d")
    with pytest.raises(mtf.UserError, match="heads:pipe: 'heads' has size 4, not divisible by the 3 devices"):
        small(built, **{**asked, "devices": 3}, pins="heads:pipe")


def test_prohibitions_are_honoured(model: mtf.Model) -> None:
    free = small(model)
    forbidden = ";".join(f"{name}:{'+'.join(axes)}" for name, axes in free.layout.items())
    other = small(model, forbid=forbidden)
    assert all(not set(axes) & set(free.layout.axes(name)) for name, axes in other.layout.items())
    assert other.predicted.step_seconds >= free.predicted.step_seconds


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pins": "bach:data"}, "pins bach: no operation has this dimension; .*batch"),
        ({"forbid": "bach:data"}, "forbid bach: no operation has this dimension"),
        ({"pins": "batch:dat"}, "'dat'"),
        ({"pins": "classes:data+model"}, "has size 10, (not divisible by|which) the 4 devices"),
        ({"pins": "batch:data;batch:model"}, "batch"),
        (
            {"pins": "batch:data", "forbid": "batch:data"},
            "forbid excludes data for 'batch'; remove the pin",
        ),
        ({"memory": 0}, "memory is 0; give a positive number of bytes"),
        ({"top": 0}, "top is 0; give a whole number of at least 1"),
        ({"time_limit": 0}, "time_limit is 0; give a positive number"),
        ({"objective": "speed"}, "choose one of time, memory, pareto"),
        ({"mesh": None}, "either a mesh .* or a number of devices"),
        ({"devices": 4}, "either a mesh .* or a number of devices"),
        ({"mesh": None, "devices": 0}, "devices=0: write at least 1"),
        ({"mesh": None, "devices": 4, "max_axes": 0}, "max_axes=0: write at least 1"),
        ({"mesh": None, "devices": 4, "pins": "batch:a+b+c"}, "no mesh of 4 devices has as many"),
        ({"mesh": None, "devices": 4, "diloco": "sites"}, "give the mesh with mesh"),
        ({"storage": ("zero4",)}, "zero4"),
    ],
)
def test_bad_input(model: mtf.Model, asked: dict[str, object], message: str) -> None:
    with pytest.raises(mtf.UserError, match=message) as caught:
        small(model, **asked)
    assert "\n" not in str(caught.value)


def test_contradictory_pins_leave_nothing(model: mtf.Model) -> None:
    with pytest.raises(
        mtf.InfeasibleError, match="pins and forbid together exclude every layout; remove one of their rules"
    ):
        small(model, pins="batch:data;pixels:data", alternatives=True)


def test_the_mesh_is_searched_too() -> None:
    model = mlp(batch=16, hidden=64)
    plan = small(model, mesh=None, devices=8, max_axes=3)
    assert plan.mesh.devices == 8
    assert set(plan.mesh.names) <= {"data", "data2", "data3", "model", "model2", "model3"}
    for text in ("a:8", "a:2;b:2;c:2"):
        given = small(model, mesh=text)
        assert plan.predicted.step_seconds <= given.predicted.step_seconds * (1 + 1e-9)
    assert plan.data.solver.status == "OPTIMAL"


def test_prime_and_single_devices(model: mtf.Model) -> None:
    assert small(model, mesh=None, devices=7).mesh.devices == 7  # nothing divides: replicated
    assert small(model, mesh=None, devices=7).layout == mtf.Layout()
    assert small(model, mesh=None, devices=1).mesh.devices == 1


def test_the_best_are_distinct_and_sorted(model: mtf.Model) -> None:
    plan = small(model, top=6)
    listed = [a for a in plan.alternatives if a.name.startswith("number ")]
    assert [a.name for a in listed] == [f"number {i}" for i in range(2, 7)]
    seconds = [plan.predicted.step_seconds, *(a.predicted.step_seconds for a in listed if a.predicted)]
    assert seconds == sorted(seconds)
    layouts = [json.dumps(plan.data.layout), *(json.dumps(a.layout) for a in listed)]
    assert len(set(layouts)) == 6


def test_a_plan_whose_data_was_changed_is_none(model: mtf.Model, tmp_path: Path) -> None:
    """Price and proof are of what it was; nothing trains on the one and saves the other."""
    for change in (
        lambda plan: plan.data.layout.pop("batch"),
        lambda plan: plan.data.layout["batch"].clear(),
        lambda plan: plan.data.recompute.append("layers"),
        lambda plan: plan.data.mesh.update(another=2),
    ):
        plan = copy.deepcopy(small(model))
        plan.save(tmp_path / "plan.json")
        change(plan)
        for use in (partial(mtf.Trainer, model, plan), partial(plan.save, tmp_path / "other.json")):
            with pytest.raises(
                mtf.UserError,
                match=r"the data of this plan for .* was changed, so the prediction",
            ):
                use()
        with pytest.raises(AttributeError):
            plan.layout = mtf.Layout()  # type: ignore[misc]
        assert not (tmp_path / "other.json").exists()
        load_plan(tmp_path / "plan.json").save(tmp_path / "again.json")


def test_no_point_of_the_frontier_is_dominated(model: mtf.Model) -> None:
    where = {"mesh": "x:4"}
    plan = small(model, objective="pareto", **where)
    assert plan.data.frontier and len(plan.data.frontier) > 1
    points = [
        (p.predicted.step_seconds, p.predicted.peak_memory_bytes) for p in plan.data.frontier if p.predicted
    ]
    for (fast, big), (slow, lean) in itertools.pairwise(points):
        assert fast < slow and big > lean
    fastest, leanest = small(model, **where), small(model, objective="memory", **where)
    assert points[0][0] == pytest.approx(fastest.predicted.step_seconds, rel=1e-9)
    assert points[-1][1] == leanest.predicted.peak_memory_bytes
    for point in plan.data.frontier[1:3]:
        assert point.predicted
        within = small(model, memory=point.predicted.peak_memory_bytes, **where)
        assert within.predicted.step_seconds == pytest.approx(point.predicted.step_seconds, rel=1e-9)


def test_least_memory(model: mtf.Model) -> None:
    plan = small(model, objective="memory", storage=("layout", "zero3"), alternatives=True)
    assert plan.solver.status == "OPTIMAL"
    for each in (*plan.alternatives, small(model)):
        if each.predicted is not None:
            assert plan.predicted.peak_memory_bytes <= each.predicted.peak_memory_bytes


def test_plans_survive_files(model: mtf.Model, tmp_path: Path) -> None:
    plan = small(model, mesh="x:4", memory=20_000, storage=("layout", "zero3"), microbatches=(1, 2), top=2)
    path = tmp_path / "deep" / "plan.json"
    plan.save(path)
    again = load_plan(path)
    assert again.to_json() == plan.to_json()
    assert (again.mesh, again.layout, again.options) == (plan.mesh, plan.layout, plan.options)
    evaluation = evaluate(model, again.mesh, again.layout, load_hardware("tpu-v3"), again.options)
    assert evaluation.predicted == plan.predicted
    check_plan_model(again, model)


def test_a_plan_for_another_model_names_the_difference() -> None:
    one, other = (transformer(layers=2, d_model=16, d_kv=8, heads=2, d_ff=n, vocab=32) for n in (32, 64))
    one.hparams, other.hparams = {"d_ff": 32}, {"d_ff": 64}
    plan = small(one)
    with pytest.raises(
        mtf.UserError,
        match=r"d_ff=32 in the plan, 64 in this model; .* parameters in the plan, .* in this model",
    ):
        check_plan_model(plan, other)
    with pytest.raises(mtf.UserError, match=r"the plan's model is 'transformer_lm', this model is 'mlp'"):
        check_plan_model(plan, mlp())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "it must be a JSON object, but is list"),
        ('{"format": "layoutopt-plan/9"}', "has format 'layoutopt-plan/9'"),
        ('{"format": "layoutopt-plan/1"}', r"'model' is missing, .* \(and \d+ more\)"),
    ],
)
def test_files_that_are_no_plans(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(mtf.UserError, match=message):
        load_plan(path)
    with pytest.raises(mtf.UserError, match="cannot be read"):
        load_plan(tmp_path / "none.json")


def test_the_papers_layout_is_beside_and_not_better() -> None:
    """The 4.9 B parameter model of Shazeer et al. 2018, section 9.1."""
    model = transformer(
        layers=6,
        d_model=1024,
        d_kv=256,
        heads=256,
        d_ff=262144,
        vocab=32768,
        batch=256,
        length=256,
        dtype="bfloat16",
        optimizer="adafactor",
    )
    assert model.parameters == 4_899_222_528
    plan = search(model, mesh="batch:16;model:32", hardware="tpu-v2", storage=("layout",), microbatches=(1,))
    (paper,) = [a for a in plan.alternatives if a.name == "Mesh-TensorFlow paper"]
    assert paper.mesh == {"batch": 16, "model": 32}
    assert paper.feasible and paper.predicted is not None
    assert plan.predicted.step_seconds <= paper.predicted.step_seconds
    assert plan.solver.status == "OPTIMAL"
    evaluation = evaluate(model, plan.mesh, plan.layout, load_hardware("tpu-v2"), plan.options)
    assert evaluation.predicted == plan.predicted
