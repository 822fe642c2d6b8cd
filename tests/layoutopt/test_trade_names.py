"""What the trade calls the axes of a layout."""

from __future__ import annotations

from typing import Any

import pytest

import mesh_tf_core as mtf
from examples.moe_lm import model as mixture
from examples.transformer_lm import model as transformer
from layoutopt.plan.decided import Decided
from layoutopt.plan.trade_names import trade_names

LM, MOE = transformer(), mixture()


@pytest.mark.parametrize(
    ("model", "layout", "said", "names"),
    [
        (LM, "batch:a;heads:b;d_ff:b", {}, ("data", "tensor")),
        (LM, "batch:a;heads:b;d_ff:b", {"stage": "zero3"}, ("data (FSDP)", "tensor")),
        (LM, "batch:a;length:b", {"stage": "zero2"}, ("data (ZeRO-2)", "storage (ZeRO-2) + sequence")),
        (LM, "batch:a+b", {"stage": "zero1@b"}, ("data", "data (ZeRO-1)")),
        (
            LM,
            "batch:a;length:b;memory_length:b",
            {"context": {"memory_length": "ring"}},
            ("data", "context"),
        ),
        (LM, "batch:a;heads:b;length@elsewhere:b", {}, ("data", "sequence + tensor")),
        (LM, "positions:a", {}, ("idle", "idle")),
        (MOE, "batch:a+b;expert_batch:a;experts:b", {}, ("data", "data + expert")),
    ],
)
def test_names(model: mtf.Model, layout: str, said: dict[str, Any], names: tuple[str, str]) -> None:
    trained = [n for n, v in model.graph.variables.items() if v.trainable]
    stage = said.get("stage")
    decided = Decided(storage=dict.fromkeys(trained, stage) if stage else {}, context=said.get("context", {}))
    found = trade_names(model, mtf.Mesh("a:2;b:4;alone:1"), mtf.Layout(layout), decided)
    assert tuple(found.values()) == names and [*found] == ["a", "b"]
