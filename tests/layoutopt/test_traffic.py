"""The traffic that an answer shows is of the messages that it prices, not of one program for all stages."""

from __future__ import annotations

from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels import load_hardware
from examples.transformer_lm import model as transformer
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import evaluate

SIZES: dict[str, Any] = {
    "layers": 4,
    "d_model": 64,
    "d_kv": 16,
    "heads": 4,
    "d_ff": 256,
    "vocab": 1024,
    "batch": 64,
    "length": 32,
    "dtype": "bfloat16",
}


def priced(framework: str, mesh: str, layout: str, storage: Any = "", **options: Any) -> Evaluation:
    machine, model = load_hardware("h100", framework), transformer(**SIZES)
    given = mtf.Options(dict.fromkeys(model.graph.variables, storage) if storage else {}, **options)
    return evaluate(model, mtf.Mesh(mesh), mtf.Layout(layout), machine, given)


@pytest.mark.parametrize("parts", [1, 4])
def test_gradients_cross_in_the_type_that_the_framework_sums_them_in(parts: int) -> None:
    """A ring of 8 devices sends 7/8 of the gradients, and of the weights in bfloat16; and the loss."""
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        framework = f"megatron:gradients={dtype}"
        found = priced(framework, "data:8", "batch:data", storage="zero1", microbatches=parts)
        assert found.sent == {"data": pytest.approx(7 / 8 * found.model.parameters * (size + 2), rel=1e-4)}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_stage_sends_what_it_passes_on(schedule: str) -> None:
    """Each microbatch forward and backward, and while stages fill and drain at most 2 (4 - 1) more."""
    layout = "layers:pipe;batch:data"
    found = priced("megatron", "pipe:4;data:2", layout, microbatches=8, schedule=schedule)
    passed = 64 / 8 / 2 * 32 * 64 * 2
    assert 2 * 8 * passed <= found.sent["pipe"] <= (2 * 8 + 6) * passed


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "torch", "maxtext", "layoutopt"])
@pytest.mark.parametrize(
    ("mesh", "layout", "options"),
    [
        ("data:4;model:2", "batch:data;heads:model;d_ff:model", {"storage": "zero1"}),
        ("pipe:4;data:2", "layers:pipe;batch:data", {"microbatches": 8, "schedule": "1f1b"}),
    ],
)
def test_traffic_is_that_of_the_priced_lines(
    framework: str, mesh: str, layout: str, options: dict[str, Any]
) -> None:
    found = priced(framework, mesh, layout, **options)
    lines = [x for x in found.cost.lines if x.axes]
    assert sum(found.sent.values()) == pytest.approx(sum(x.sent * x.times for x in lines))
    assert found.predicted.communication_bytes_per_device == found.sent
    for axis in found.program.mesh.names:
        assert found.sent[axis] == pytest.approx(sum(x.sent * x.times for x in lines if x.axes == (axis,)))
