"""Likely mistakes in a layout: each is found, its fix is better, and a good layout has none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import layoutopt
from costmodels.hardware import load_hardware, machine_of, with_settings
from costmodels.hardware.model import CompilerName
from costmodels.pricing.hidden import Cost
from examples.moe_lm import model as mixture
from layoutopt.analysis.lint import NOTHING, lint, slower, unexpressed
from layoutopt.importers.huggingface import from_huggingface
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.plan.results import Finding
from layoutopt.plan.units import step_change
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from tests.layoutopt.models import SMALL, transformer
from tests.marks import by_day
from tests.searching import search

WIDE = {**SMALL, "d_model": 128, "d_kv": 32, "d_ff": 512, "vocab": 512, "length": 128}
PLAIN = Options()
DATA = Path(__file__).parents[1] / "data"
LOSSES = json.loads((DATA / "huggingface_losses.json").read_text())["models"]


def findings(layout: str, mesh: str = "data:2;model:4", **hparams: object) -> list[Finding]:
    model, hardware = transformer(**{**WIDE, **hparams}), load_hardware("tpu-v3")
    return lint(model, evaluate(model, Mesh(mesh), Layout(layout), hardware, PLAIN), hardware, PLAIN)


def seconds(layout: str) -> float:
    found = evaluate(transformer(**WIDE), Mesh("data:2;model:4"), Layout(layout), load_hardware("tpu-v3"))
    return found.cost.step_seconds


def test_an_axis_that_splits_nothing() -> None:
    (found,) = [f for f in findings("batch:data") if f.kind == "wasted axis"]
    assert found.message == "axis 'model' splits nothing, so its 4 devices all do the same work"
    assert found.fix is not None and "less step time" in found.fix
    assert found.layout is not None and seconds(found.layout) < seconds("batch:data")


def test_work_that_is_repeated_names_where() -> None:
    (found,) = [f for f in findings("batch:data;vocab:model") if f.kind == "repeated work"]
    assert found.message.startswith("the 4 devices of 'model' repeat ")
    assert "feed_forward" in found.message and "attention" in found.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("schedule", "compiler", "repeats"), [
    ("1f1b", "xla-gpu", True), ("1f1b", "launched", False), ("1f1b", "eager", False),
    ("interleaved:2", "launched", False), ("gpipe", "launched", False),
])  # fmt: skip
def test_stages_with_programs_of_their_own_repeat_no_output_layer(
    schedule: str, compiler: CompilerName, repeats: bool
) -> None:
    model, hardware = transformer(**{**WIDE, "layers": 4}), replace(load_hardware("h100"), compiler=compiler)
    options = Options(microbatches=4, schedule=schedule)
    found = evaluate(model, Mesh("pipe:2"), Layout("layers:pipe"), hardware, options)
    kinds = [f.message for f in lint(model, found, hardware, options) if f.kind == "repeated work"]
    assert bool(kinds) is repeats and all("'pipe'" in said for said in kinds)
    assert repeats is ("pipe" in found.repeated)  # of the notes of plans, too


def test_a_size_that_does_not_divide() -> None:
    kinds = {f.kind: f for f in findings("batch:data;d_ff:model", heads=6, kv_heads=6)}
    assert (
        kinds["indivisible"].message
        == "'heads' has size 6, which is not divisible by the 4 devices of 'model'"
    )
    assert kinds["indivisible"].fix == "change the size to 4 or 8"


def test_an_axis_of_one_device() -> None:
    found = findings("batch:data;d_ff:model", mesh="data:2;model:1")
    assert [f.kind for f in found if f.kind != "repeated memory"] == ["axis of one"]


def test_variables_held_by_all() -> None:
    (found,) = [f for f in findings("batch:data+model") if f.kind == "repeated memory"]
    assert found.fix is not None and found.fix.startswith("--storage zero")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", ["data:2;model:2", "data:4"])
def test_the_best_layout_repeats_no_work(mesh: str) -> None:
    model, hardware = transformer(**WIDE), load_hardware("tpu-v3")
    plan = search(model, mesh=mesh, hardware=hardware, microbatches=[1])
    evaluation = evaluate(model, plan.mesh, plan.layout, hardware, plan.options)
    assert not [f for f in lint(model, evaluation, hardware, plan.options) if f.layout]


def test_attention_that_no_library_takes() -> None:
    found = [f for f in findings("batch:data;heads:model", length=64) if f.kind == "no kernel"]
    assert len(found) == 1 and "keys, which must be multiples of" in found[0].message
    assert "no kernel" not in [f.kind for f in findings("batch:data;heads:model")]


def test_a_slow_layout_names_where_it_loses() -> None:
    model, hardware = transformer(**WIDE), load_hardware("tpu-v3")

    def cost(layout: str) -> Cost:
        return evaluate(model, Mesh("data:2;model:4"), Layout(layout), hardware, PLAIN).cost

    best, slow = cost("batch:data+model"), cost("batch:data;d_ff:model")
    found = slower(slow, best)
    assert found is not None and found.kind == "slower"
    lost = {
        place: seconds - best.by(lambda x: x.origin.scope).get(place, 0.0)
        for place, seconds in slow.by(lambda x: x.origin.scope).items()
    }
    assert found.message.startswith(f"{max(lost, key=lambda place: lost[place])} takes ")
    assert slower(best, best) is None


STEPS = {
    "plain": (0.6, "data:4", "batch:data", {}),
    "recomputed": (2.0, "data:4", "batch:data", {"recompute": "always", "storage": "zero3"}),
    "staged": (2.0, "pipe:2;data:2", "batch:data;layers:pipe", {"microbatches": "4"}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", by_day(STEPS))
@pytest.mark.one_in(2)
def test_nothing_contradicts_the_best_layout(name: str) -> None:
    """Neither the layout itself nor a change of it that fits is faster than what is called the best; the
    first number is the memory, as a share of the peak."""
    share, mesh, layout, decided = STEPS[name]
    model, v3 = transformer(**WIDE), load_hardware("tpu-v3")
    peak = layoutopt.cost(model, mesh, layout, v3, **decided).predicted.peak_memory_bytes
    needs = int(share * peak * v3.devices_per_chip + v3.chip.memory_reserve.value)
    found = layoutopt.lint(model, mesh, layout, f"tpu-v3, memory={needs}B", **decided)
    kinds, fits = [f.kind for f in found.findings], share >= 1
    assert found.priced.fits == fits and ("does not fit" in kinds) != fits
    assert found.fastest is not None and found.data.best is not None and found.best is not None
    assert found.fastest.reason(found.priced.limit) is None
    best = found.data.best.step_seconds * (1 - 1e-6)
    assert best <= found.best.predicted.step_seconds
    assert not fits or best <= found.priced.predicted.step_seconds
    assert found.status != "OPTIMAL" or found.fastest.layout == found.best.layout
    assert "0." not in found.costs.split("×")[0] or not fits


@pytest.mark.nightly
def test_a_decision_that_nothing_needs_is_named() -> None:
    model = transformer(**SMALL)
    found = layoutopt.lint(model, "data:2", "batch:data", "tpu-v3", recompute="always")
    (said,) = [f for f in found.findings if f.kind == "unnecessary"]
    assert said.message.startswith("recomputation is not needed: the layout uses ")
    assert said.fix is not None and "without recomputation: " in said.fix and "% shorter" in said.fix


@pytest.mark.parametrize("after, said", [(1.051, "5.1 % longer"), (0.949, "5.1 % shorter"), (1.0, "as long")])
def test_changes_of_time_have_no_sign(after: float, said: str) -> None:
    assert step_change(after, 1.0) == said


@pytest.mark.one_in(288)
@pytest.mark.parametrize("name", [n for n in LOSSES if n != "qwen3_next"])
def test_an_idle_axis_of_any_family(name: str) -> None:
    check_idle(name)


def check_idle(name: str) -> None:
    """Loops inside layers are no stages: to propose them is refused, and nothing else fails for it."""
    config, hardware = LOSSES[name]["config"], load_hardware("h100")
    length = min(128, from_huggingface(config).hparams["length"])  # learned positions end
    model = from_huggingface(config, batch=8, length=length)
    found = evaluate(model, Mesh("data:2;model:2"), Layout("batch:data"), hardware, PLAIN)
    assert "wasted axis" in {each.kind for each in lint(model, found, hardware, PLAIN)}


@pytest.mark.nightly
def test_an_idle_axis_of_a_family_whose_layers_have_loops() -> None:
    check_idle("qwen3_next")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("framework", ["layoutopt", "torchtitan", "megatron"])
def test_splits_that_are_proposed_save_as_said_and_can_be_expressed(framework: str) -> None:
    model, mesh, hardware = mixture(), Mesh("data:4"), load_hardware("h100", framework)
    own = evaluate(model, mesh, Layout("batch:data"), hardware, PLAIN)
    (found,) = [f for f in lint(model, own, hardware, PLAIN) if f.kind == "repeated work"]
    proposed = re.findall(r"'(\w+)' over data: (\d+)%", found.fix or "")
    assert {name for name, _ in proposed} & {"expert_batch", "experts"}
    for name, less in proposed:
        layout = Layout(f"batch:data;{name}:data")
        mended = evaluate(model, mesh, layout, hardware, PLAIN)
        assert abs(1 - mended.cost.step_seconds / own.cost.step_seconds - int(less) / 100) < 0.01
        assert unexpressed(model, hardware, mesh, layout, PLAIN) == NOTHING


@pytest.mark.nightly
def test_changes_that_the_framework_lacks_are_not_offered() -> None:
    """For a layout that does not fit: Megatron cannot keep the products of layers alone."""
    wide = {**WIDE, "length": 1024, "batch": 2, "layers": 8}
    model, mesh, fixes = transformer(**wide), Mesh("data:2"), {}
    for framework in ("layoutopt", "megatron"):
        plain = evaluate(model, mesh, Layout("batch:data"), load_hardware("h100", framework))
        small = with_settings("h100", [f"memory={0.75 * plain.memory.peak:.0f}B", "memory_reserve=0B"])
        found = layoutopt.lint(model, mesh, "batch:data", machine_of(small, framework, "layoutopt"))
        fixes[framework] = next(f.fix for f in found.findings if f.kind == "does not fit") or ""
    assert "keep=products:" in fixes["layoutopt"] and fixes["megatron"].startswith("recompute layers:count=")


def test_sizes_are_no_finding_where_another_split_mends_the_work() -> None:
    """Of 12 examples on 6 devices that repeat all, nobody changes the model."""
    kinds = {f.kind: f for f in findings("d_ff:data", mesh="data:2;model:6", batch=12)}
    assert "'batch' over model" in str(kinds["wasted axis"].fix) and "indivisible" not in kinds
