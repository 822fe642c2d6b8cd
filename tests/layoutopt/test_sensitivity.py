"""Other conditions, and uncertain hardware."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from layoutopt import search
from layoutopt.analysis.explain import forbidden
from layoutopt.analysis.sensitivity import _best, robustness, sensitivity
from layoutopt.plan.build import Plan
from layoutopt.plan.details import Trial
from layoutopt.runtime.clock import Clock
from layoutopt.space.decisions import SearchSpace
from tests.layoutopt.models import EXAMPLES

Curves = dict[str, tuple[Trial, ...]]
ASKED = SearchSpace(storage=("layout", "zero1"), recompute=(False,), microbatches=(1,))


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return EXAMPLES["mlp"]()


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware("tpu-v3")


@pytest.fixture(scope="module")
def plan(model: mtf.Model, hardware: Hardware) -> Plan:
    return search(model, mesh="data:2;model:2", hardware=hardware, space=ASKED)


@pytest.fixture(scope="module")
def curves(model: mtf.Model, plan: Plan, hardware: Hardware) -> Curves:
    limit = 1.1 * plan.predicted.peak_memory_bytes
    return {c.factor: c.points for c in sensitivity(model, plan, hardware, limit, ASKED)}


def test_all_asks_of_no_pipeline_that_the_plan_has_not(plan: Plan) -> None:
    asked = replace(ASKED, pipeline=("layers",))
    assert "pipeline" not in forbidden(plan, asked, ["all"])
    assert forbidden(plan, asked, ["pipeline"]) == ["pipeline"]
    staged = Plan(plan.data.model_copy(update={"layout": {"layers": ["data"]}}))
    assert "pipeline" in forbidden(staged, asked, ["all"])


def test_every_factor_has_its_curve_through_the_plan(curves: Curves, plan: Plan) -> None:
    assert list(curves) == ["bandwidth", "memory", "devices"]
    for curve in curves.values():
        assert curve[1].step_seconds == plan.predicted.step_seconds
    assert [t.value for t in curves["devices"]] == [2, 4, 8]


def test_more_bandwidth_or_memory_is_never_slower(curves: Curves) -> None:
    for name in ("bandwidth", "memory"):
        found = [t.step_seconds for t in curves[name] if t.step_seconds is not None]
        assert found == sorted(found, reverse=True)


def test_half_the_memory_is_proven_too_little_or_slower(curves: Curves, plan: Plan) -> None:
    least = curves["memory"][0]
    assert least.proven
    assert least.step_seconds is None or least.step_seconds >= plan.predicted.step_seconds


def test_a_trial_is_what_a_search_finds(
    curves: Curves, model: mtf.Model, plan: Plan, hardware: Hardware
) -> None:
    found = search(model, devices=8, hardware=hardware, space=ASKED)
    assert curves["devices"][2].step_seconds == pytest.approx(found.predicted.step_seconds, rel=1e-9)


def test_pins_hold_with_other_numbers_of_devices(model: mtf.Model, plan: Plan, hardware: Hardware) -> None:
    limit, axis = 3.0 * plan.predicted.peak_memory_bytes, plan.mesh.names[0]
    asked = replace(ASKED, pins={"batch": (axis,)}, given=ASKED.given | {"pins"})
    pinned = search(model, str(plan.mesh), hardware=hardware, space=asked)
    found = {c.factor: c.points for c in sensitivity(model, pinned, hardware, limit, asked)}
    assert [t.value for t in found["devices"]] == [2, 4, 8]
    assert all(t.step_seconds and f"batch:{axis}" in t.layout for t in found["devices"])


def test_details_are_what_reports_read(curves: Curves) -> None:
    assert [p.value for p in curves["bandwidth"]] == [0.5, 1.0, 2.0]
    assert all(p.step_seconds and p.layout for p in curves["bandwidth"])
    assert not {"bound", "found_seconds", "answer"} & curves["memory"][1].to_json().keys()


def test_robustness_counts_machines(model: mtf.Model, plan: Plan, hardware: Hardware) -> None:
    found = robustness(model, plan, hardware, draws=20)
    assert found.draws == 20 and 0 < found.wins <= 20 and found.uncertain > 0
    assert (found.wins == 20) == (found.worst == 0.0)


def test_what_one_search_found_and_proved_holds_under_the_conditions_that_it_holds_under(
    model: mtf.Model, plan: Plan, hardware: Hardware
) -> None:
    at_once = Clock(0.0)
    limit = 3.0 * plan.predicted.peak_memory_bytes
    found = {c.factor: c.points for c in sensitivity(model, plan, hardware, limit, ASKED, clock=at_once)}
    less, own, more = found["memory"]
    assert [t.found_seconds for t in (less, own, more)] == [plan.predicted.step_seconds] * 3
    assert (less.proven, own.proven, more.proven) == (True, True, False)  # its bound says nothing of more
    slow, _, fast = found["bandwidth"]
    assert slow.found_seconds and own.step_seconds and fast.found_seconds
    assert slow.found_seconds > own.step_seconds > fast.found_seconds
    assert more.step_seconds is None and not more.layout  # far from its bound: nothing is said of it
    assert not slow.proven and slow.bound == plan.solver.bound and fast.bound == 0.0
    assert [t.step_seconds for t in found["devices"]] == [None, own.step_seconds, None]


def test_a_stopped_search_far_from_its_bound_is_no_result(plan: Plan) -> None:
    step = plan.predicted.step_seconds
    solver = plan.solver.model_copy(update={"status": "FEASIBLE"})
    stopped = Plan(plan.data.model_copy(update={"solver": solver}))
    far, near = (_best(2.0, stopped, None, step / times, given=False) for times in (73.0, 1.04))
    assert (far.step_seconds, far.found_seconds, far.layout, far.proven) == (None, step, "", False)
    assert near.step_seconds == step and near.layout and not near.proven
    nothing, unknown = (_best(2.0, proven, None, 0.0, given=False) for proven in (True, False))
    assert (nothing.proven, unknown.proven) == (True, False)
