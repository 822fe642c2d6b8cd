"""The price of replicas that train separately for some steps: a step, and its share of a meeting."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware, with_settings
from layoutopt.optimize.evaluation.evaluation import Evaluation, over_axis
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.plan.build import decided, options_of
from layoutopt.plan.trade_names import trade_names
from tests.core.test_replicas import model

MESH, LAYOUT = mtf.Mesh("sites:4;data:2;model:2"), mtf.Layout("batch:data;f:model")
ADAM = mtf.Adam(1e-2)


def priced(period: int, storage: int = 0) -> Evaluation:
    options = mtf.Options({"wi": storage, "wo": storage}, diloco=mtf.DiLoCo("sites", period))
    return evaluate(model(ADAM, dtype="float32"), MESH, LAYOUT, load_hardware("tpu-v5e"), options)


@pytest.mark.parametrize("storage", [0, 1, 3])
def test_a_meeting_costs_its_share_of_a_step(storage: int) -> None:
    one, ten = priced(1, storage), priced(10, storage)
    alone = ten.prices.cost(ten.program).step_seconds
    assert ten.cost.step_seconds - alone == pytest.approx((one.cost.step_seconds - alone) / 10)
    assert ten.predicted.communication_bytes_per_device["sites"] == pytest.approx(
        one.predicted.communication_bytes_per_device["sites"] / 10
    )
    # Of 4 replicas, a ring sends 2 (n - 1) / n times what a device has of the parameters.
    own = 4 * 2 * (2 * 4 * 8) / 2 / (2 if storage else 1)
    assert one.predicted.communication_bytes_per_device["sites"] == 2 * 3 / 4 * own


@pytest.mark.parametrize("hidden", [True, False])
def test_steps_of_a_delay_hide_what_crosses_the_axis(hidden: bool) -> None:
    slow = () if hidden else ("nic_bandwidth=0.000001GB/s", "node_egress=0.000001GB/s")
    machine = load_hardware(with_settings("h100", ["node_size=4", *slow]))
    found = {}
    for delay in (0, 2):
        options = mtf.Options(diloco=mtf.DiLoCo("sites", 6, fragments=2, delay=delay))
        found[delay] = evaluate(model(ADAM, rows=1 << 20, dtype="float32"), MESH, LAYOUT, machine, options)
    at_once, late = found[0], found[2]
    step = late.prices.cost(late.program).step_seconds
    messages = [over_axis(late.prices.cost(met), "sites") for met in late.replicas.outer]  # type: ignore[union-attr]
    waited = sum(x.exposed * x.times for x in late.cost.lines if "sites" in x.axes)
    assert waited == pytest.approx(sum(max(0.0, each - 2 * step) for each in messages) / 6)
    assert (waited > 0) is not hidden
    assert late.sent["sites"] == at_once.sent["sites"]
    flying = 2 * 4 * (4 * 8 / 2)  # of each variable one layer, float32, over `model`
    kept = [
        sum(v.value.local(MESH).bytes for v in each.program.variables.values()) for each in found.values()
    ]
    assert kept[1] - kept[0] == flying


def test_replicas_learn_from_batches_of_their_own() -> None:
    found = priced(10)
    plain = evaluate(found.model, mtf.Mesh("data:2;model:2"), LAYOUT, load_hardware("tpu-v5e"))
    assert found.predicted.model_flops == 4 * plain.predicted.model_flops  # type: ignore[operator]
    rate = 4 * found.model.examples / found.cost.step_seconds
    assert found.predicted.examples_per_second == pytest.approx(rate)


def test_what_replicas_keep_to_meet_is_in_memory() -> None:
    """Beside the variables, what they began from and the outer momentum, both split like the variables."""
    found = priced(10)
    plain = evaluate(found.model, mtf.Mesh("data:2;model:2"), LAYOUT, load_hardware("tpu-v5e"))
    parameters = 4 * 2 * (2 * 4 * 8) / 2
    assert found.memory.peak >= plain.memory.peak + 2 * parameters


def test_files_say_it() -> None:
    options = mtf.Options(diloco=mtf.DiLoCo("sites", 20))
    said = decided(options, LAYOUT)
    assert said.diloco == "sites:period=20,rate=0.7,momentum=0.9" and options_of(said) == options
    assert "train separately" in said.listed()["replicas"]
    named = trade_names(model(ADAM), MESH, LAYOUT, said)
    assert named["sites"] == "data (DiLoCo)" and named["data"] == "data"
    assert "diloco" not in decided(replace(options, diloco=None), LAYOUT).model_dump()
