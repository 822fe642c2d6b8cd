"""Schedules, recomputation, host offload and storage combine, or one rule says why two of them do not."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples import transformer_lm
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core.errors import UserError
from mesh_tf_core.exclusions import EXCLUDED
from mesh_tf_core.ir.schedules import KINDS
from mesh_tf_core.lower.options import ACTIVATIONS
from mesh_tf_core.lower.options import KINDS as HOSTED
from mesh_tf_core.lower.storage import STAGES

MODEL = transformer_lm.model(layers=8, d_model=8, d_kv=4, heads=2, d_ff=16, vocab=16, batch=8, length=4)
TRAINED = [v.name for v in MODEL.graph.variables.values() if v.trainable]
SCHEDULES = ["", *(name + ":2" * kind.rounds for name, kind in KINDS.items())]
RECOMPUTE = ("", "layers", "layers:keep=attention", "layers:count=1", "tick")
EVERY = [*itertools.product(SCHEDULES, RECOMPUTE, ("", *HOSTED), STAGES)]
ON_DEVICES = "save for the backward pass stay on the devices", "saves values for a backward pass"
NO_TICKS = "the model has no loop over 'tick'"


def price(schedule: str, recompute: str, hosted: str, stage: str) -> None:
    named = [recompute.partition(":")[0] or "layers"] if hosted == ACTIVATIONS else TRAINED
    chosen: dict[str, Any] = {
        "storage": dict.fromkeys(TRAINED, stage),
        "recompute": frozenset(filter(None, [recompute])),
        "offload": frozenset((hosted, name) for name in named if hosted),
        "microbatches": 4,
    }
    mesh, layout = ("pipe:2;data:2", "layers:pipe;batch:data") if schedule else ("data:2", "batch:data")
    options = mtf.Options(**chosen, **({"schedule": schedule} if schedule else {}))
    hardware = load_hardware("h100", "torch")
    found = evaluate(MODEL, mtf.Mesh(mesh), mtf.Layout(layout), hardware, options)
    assert found.cost.step_seconds > 0 and found.memory.peak > 0


@pytest.mark.parametrize("count", [30, pytest.param(len(EVERY), marks=pytest.mark.nightly)])
def test_every_combination_has_a_price_or_is_refused_by_a_rule(count: int) -> None:
    known, refused = [*(each.why for each in EXCLUDED), *ON_DEVICES, NO_TICKS], 0
    for chosen in random.Random(0).sample(EVERY, count):
        try:
            price(*chosen)
        except UserError as error:
            assert any(why in str(error) for why in known), (chosen, str(error))
            refused += 1
    assert refused < count / 2
