"""Why nothing fits: the conflict is minimal, the repairs are what a search under them finds."""

from __future__ import annotations

from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt import search
from layoutopt.cli.repairs import settings_with, smaller_batch
from layoutopt.models.loading import load_model as loaded
from layoutopt.optimize.answers.infeasible import Diagnosis, diagnose
from layoutopt.plan.build import Plan
from mesh_tf_core.errors import InfeasibleError, LimitError
from tests.layoutopt.models import EXAMPLES

PLAIN: dict[str, Any] = {
    "mesh": "data:2;model:2",
    "hardware": "tpu-v3",
    "storage": ["layout"],
    "recompute": [False],
    "microbatches": [1],
}


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return EXAMPLES["mlp"]()


@pytest.fixture(scope="module")
def asked(model: mtf.Model) -> dict[str, Any]:
    """A little less memory than a layout takes that splits the batch alone; with a pin that is no matter."""
    pins = "batch:data+model;classes:none"
    least = search(model, pins=pins, objective="memory", **PLAIN).predicted.peak_memory_bytes
    return {**PLAIN, "memory": 0.97 * least, "pins": pins}


@pytest.fixture(scope="module")
def diagnosis(model: mtf.Model, asked: dict[str, Any]) -> Diagnosis:
    with pytest.raises(InfeasibleError):
        search(model, **asked)
    return diagnose(search, model, asked)


@pytest.mark.slow
def test_the_conflict_is_in_the_users_words(diagnosis: Diagnosis) -> None:
    assert diagnosis.complete
    assert "--pin classes:none" not in diagnosis.conflict
    assert diagnosis.conflict[-1].startswith("--memory ")
    assert diagnosis.conflict[:2] == ("--pin batch:data+model", "--storage layout")
    assert str(diagnosis).startswith("these conditions conflict: --pin batch:data+model, --storage layout, ")


@pytest.mark.slow
def test_a_repair_is_what_a_search_finds(
    diagnosis: Diagnosis, model: mtf.Model, asked: dict[str, Any]
) -> None:
    (repair,) = [r for r in diagnosis.repairs if r.change == "without --pin batch:data+model"]
    plan = search(model, **{**asked, "pins": "classes:none"})
    assert repair.proven
    assert (repair.seconds, repair.peak) == (plan.predicted.step_seconds, plan.predicted.peak_memory_bytes)
    assert repair.peak <= asked["memory"]


@pytest.mark.slow
def test_repairs_are_sorted_and_fit(diagnosis: Diagnosis, asked: dict[str, Any]) -> None:
    costs = [r.cost for r in diagnosis.repairs]
    assert costs == sorted(costs)
    assert all(r.peak <= asked["memory"] for r in diagnosis.repairs)
    assert len(costs) >= 2


@pytest.fixture(scope="module")
def plan(model: mtf.Model) -> Plan:
    return search(model, **PLAIN)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.nightly
def test_where_no_single_change_helps_all_are_made_and_the_needless_are_not(
    model: mtf.Model, pinned: bool
) -> None:
    """A pin goes only if nothing fits under it."""
    used = {"storage": ["zero3"], "microbatches": [4]}
    plan = search(model, **{**PLAIN, **used})

    def find(_: mtf.Model, **asked: Any) -> Plan:
        allowed = all({*values} <= {*asked[name]} for name, values in used.items())
        if allowed and not (pinned and asked["pins"]) and asked["mesh"] == PLAIN["mesh"]:
            return plan
        raise InfeasibleError("nothing fits")

    pins = "classes:model" if pinned else "classes:none"
    (repair,) = diagnose(find, model, {**PLAIN, "pins": pins, "memory": 1000.0}).repairs
    rest = "--storage zero3 --microbatches 4"
    assert repair.change == (f"without --pin classes:model, and {rest}" if pinned else rest)
    assert repair.asked["microbatches"] == (4,) and repair.asked["storage"] == ("zero3",)
    assert repair.free is not pinned


def test_a_search_for_a_change_ends_with_the_first_layout_that_fits(model: mtf.Model, plan: Plan) -> None:
    """However slow the machine is: the rest of the time is for better layouts under the same changes."""
    seen: list[str] = []

    def find(_: mtf.Model, **asked: Any) -> Plan:
        if "start" in asked:
            seen.append("better")
            raise LimitError("no time")
        if asked["microbatches"] == (1,):
            raise InfeasibleError("nothing fits")
        with pytest.raises(KeyboardInterrupt):
            asked["on_better"]("a layout", 1.0, 1)
        return Plan(plan.data, stopped=True)

    found = diagnose(find, model, {**PLAIN, "memory": 1000.0})
    assert found.repairs and found.complete and seen == ["better"]
    no_time = diagnose(find, model, {**PLAIN, "memory": 1000.0}, seconds=0.0)
    assert not no_time.repairs and not no_time.complete


def test_a_search_that_the_time_limit_ended_is_mentioned(model: mtf.Model) -> None:
    def find(_: mtf.Model, **asked: Any) -> Plan:
        raise LimitError("no time")

    found = diagnose(find, model, {**PLAIN, "memory": 1000.0})
    assert not found.complete
    assert str(found).endswith("; the time for changes ended before every one was tried")


def test_the_nearest_plan_needs_what_is_proven_least(model: mtf.Model) -> None:
    least = search(model, objective="memory", alternatives=False, **PLAIN)
    with pytest.raises(InfeasibleError) as caught:
        search(model, memory=0.9 * least.predicted.peak_memory_bytes, **PLAIN)
    nearest = caught.value.nearest
    assert nearest.solver.status == "INFEASIBLE"
    assert nearest.predicted.peak_memory_bytes >= least.predicted.peak_memory_bytes
    assert nearest.solver.bound <= least.predicted.peak_memory_bytes
    assert nearest.data.details.search.memory_bytes == int(0.9 * least.predicted.peak_memory_bytes)


def test_devices_are_doubled_until_something_fits(model: mtf.Model, plan: Plan) -> None:
    """And the last number that is proven too small is named."""

    def find(_: mtf.Model, **asked: Any) -> Plan:
        if asked["devices"] < 32:
            raise InfeasibleError("nothing fits")
        return plan

    found = diagnose(find, model, {**PLAIN, "mesh": None, "devices": 4, "memory": 1000.0})
    changes = [str(repair).split(":")[0] for repair in found.repairs]
    assert changes == ["--devices 32 (16 devices are too few)"]


def test_devices_that_divide_the_batch_are_tried_between(model: mtf.Model, plan: Plan) -> None:
    """Three times as many share a batch of 96 evenly, five times do not."""
    tried: list[int] = []

    def find(_: mtf.Model, **asked: Any) -> Plan:
        tried.append(asked["devices"])
        if asked["devices"] < 24:
            raise InfeasibleError("nothing fits")
        return plan

    wide = loaded("examples/mlp.py", ["batch=96"])
    asked = {**PLAIN, "mesh": None, "devices": 4, "memory": 1000.0}
    found = diagnose(find, wide.model, asked)
    assert [str(repair).split(":")[0] for repair in found.repairs] == [
        "--devices 24 (16 devices are too few)"
    ]
    assert [n for n in dict.fromkeys(tried) if n > 4] == [8, 12, 16, 24]


def test_a_smaller_batch_is_among_the_repairs(plan: Plan) -> None:
    """The first that fits, ranked by the time for the same examples."""
    file = loaded("examples/mlp.py", ["batch=64", "layers=1"])

    def find(model: mtf.Model, **asked: Any) -> Plan:
        if model.examples > 16:
            raise InfeasibleError("nothing fits")
        return plan

    (repair,) = diagnose(find, file.model, {**PLAIN, "memory": 1000.0}, smaller=smaller_batch(file)).repairs
    assert repair.change == "--set batch=16" and repair.parts == 4
    assert repair.note == "with 1/4 of the batch per step, 1/2 does not fit"
    assert settings_with(["layers=1", "batch=64"], repair.change) == ("layers=1", "batch=16")
    odd = loaded("examples/mlp.py", ["batch=63"])
    assert smaller_batch(odd)(2) is None  # type: ignore[misc]


def test_hardware_with_more_memory_is_tried_where_none_was_given(model: mtf.Model, plan: Plan) -> None:
    def find(_: mtf.Model, **asked: Any) -> Plan:
        name = getattr(asked["hardware"], "name", asked["hardware"])
        if name == "tpu-v3" or asked.get("devices") == 4:
            raise InfeasibleError("nothing fits")
        return plan

    asked = {**PLAIN, "mesh": "data:2"}
    machines = [r for r in diagnose(find, model, asked).repairs if r.change.startswith("--hardware ")]
    assert len(machines) == 3
    own = load_hardware("tpu-v3").usable_memory_bytes
    assert all(r.asked["hardware"].name == r.change.removeprefix("--hardware ") for r in machines)
    assert all(r.limit == r.asked["hardware"].usable_memory_bytes > own for r in machines)
    given = diagnose(find, model, {**asked, "memory": 1000.0})
    assert not [r for r in given.repairs if r.change.startswith("--hardware ")]


@pytest.mark.nightly
def test_repairs_come_from_what_was_left_out() -> None:
    """From Python too: only offloading fits there, or twice the devices; following the first gives a plan.
    By day `tests.cli.test_repairs` follows an offer of each kind."""
    model = loaded("examples/mlp.py", []).model
    with pytest.raises(InfeasibleError) as caught:
        search(model, mesh="data:4", hardware="tpu-v5e", memory=80 * 1024)
    first, *others = caught.value.repairs
    assert first.change == "--offload optimizer" and first.free
    assert [each.change for each in others] == ['--mesh "data:8"']
    assert search(model, **first.asked, time_limit=10).predicted.peak_memory_bytes <= 80 * 1024
