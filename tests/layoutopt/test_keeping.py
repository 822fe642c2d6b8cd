"""What the values that layers keep are worth."""

from __future__ import annotations

import math

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt.analysis.keeping import keepings
from layoutopt.optimize.evaluation.evaluator import evaluate
from tests.layoutopt.models import EXAMPLES

ASKED = "layers:keep=attention+products"


def test_each_kind_and_name_is_taken_away_or_added() -> None:
    model, machine = EXAMPLES["transformer with fused attention"](), load_hardware("tpu-v4")
    mesh, layout = mtf.Mesh("data:2;model:2"), mtf.Layout("batch:data;heads:model;d_ff:model")
    found = keepings(model, mesh, layout, mtf.Options(recompute=frozenset({ASKED})), machine, math.inf)
    by = {k.change: k for k in found}
    assert by["without attention"].recompute == "layers:keep=products"
    assert by["without products"].recompute == "layers:keep=attention"
    assert by["nothing is kept"].recompute == "layers" and by["nothing is recomputed"].recompute == ""
    # Of products, by whatever name, nothing more can be kept.
    assert "with outputs" not in by and "with what wi makes" not in by
    assert by["with what feed_forward_norm makes"].recompute.endswith("+feed_forward_norm")
    assert by["with all other values"].recompute.endswith("+others")
    own = evaluate(model, mesh, layout, machine, mtf.Options(recompute=frozenset({ASKED})))
    assert by["nothing is kept"].step_seconds > by["without attention"].step_seconds > own.cost.step_seconds
    assert by["nothing is kept"].peak_bytes < by["without attention"].peak_bytes < own.memory.peak
    assert found == sorted(found, key=lambda k: k.step_seconds)
    for k in found:
        options = mtf.Options(recompute=frozenset({k.recompute} - {""}))
        again = evaluate(model, mesh, layout, machine, options)
        assert (k.step_seconds, k.peak_bytes) == (again.cost.step_seconds, again.memory.peak)


def test_a_framework_keeps_only_what_it_can_express() -> None:
    """torch checkpoints whole layers, or some of them."""
    model, machine = EXAMPLES["transformer"](), load_hardware("h100", "torch")
    asked = mtf.Options(recompute=frozenset({"layers"}))
    found = keepings(model, mtf.Mesh("data:2"), mtf.Layout("batch:data"), asked, machine, math.inf)
    assert [k.change for k in found] == ["nothing is recomputed"]
