"""Twenty modules as people write them, which the importer had not met (`benchmarks/torch_fresh.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.torch_fresh import layouts
from tests.importers.torch_fresh_texts import FRESH
from tests.importers.torch_models import compared

STORED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "torch_fresh.json"
REFUSED = {"graph attention"}
"""Nodes and edges of all graphs are one array: no plan splits them for PyTorch."""


def test_all_that_were_met_first_came_through_later() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert [row["type"] for row in stored["mended"]] == [*FRESH]
    assert {row["type"] for row in stored["mended"] if row["end"] != "good"} == REFUSED


@pytest.mark.nightly
@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_module_has_the_numbers_of_pytorch(name: str) -> None:
    import torch

    torch.manual_seed(0)
    module, batch = FRESH[name](8)
    model, worst = compared(module, batch)
    for layout in layouts(model, 1, 1):
        worst = max(worst, compared(module, batch, None, "x:2;y:2", layout)[1])
    assert worst < 2e-5
