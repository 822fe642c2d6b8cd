"""What the trade calls the axes of a layout."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from examples.moe_lm import model as mixture
from examples.transformer_lm import model as transformer
from layoutopt.space.trade_names import trade_names

LM, MOE = transformer(), mixture()


@pytest.mark.parametrize(
    ("model", "layout", "stage", "names"),
    [
        (LM, "batch:a;heads:b;d_ff:b", "", ("data", "tensor")),
        (LM, "batch:a;heads:b;d_ff:b", "zero3", ("data (FSDP)", "tensor")),
        (LM, "batch:a;length:b", "zero2", ("data (ZeRO-2)", "storage (ZeRO-2) + sequence")),
        (LM, "batch:a+b", "zero1@b", ("data", "data (ZeRO-1)")),
        (LM, "positions:a", "", ("idle", "idle")),
        (MOE, "batch:a+b;expert_batch:a;experts:b", "", ("data", "data + expert")),
    ],
)
def test_names(model: mtf.Model, layout: str, stage: str, names: tuple[str, str]) -> None:
    storage = dict.fromkeys((n for n, v in model.graph.variables.items() if v.trainable), stage)
    found = trade_names(model, mtf.Mesh("a:2;b:4;alone:1"), mtf.Layout(layout), storage if stage else {})
    assert tuple(found.values()) == names and [*found] == ["a", "b"]
