"""`--tokens` and `--price`: what training takes and costs, in text, JSON, plan files and reports."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

LM = ("examples/transformer_lm.py", "--hardware", "tpu-v3")
COST = ("cost", *LM, "--mesh", "data:4", "--layout", "batch:data")


def test_a_layouts_bill(result: Callable[..., dict[str, Any]]) -> None:
    """Two devices of TPU v3 are a chip."""
    found = result(*COST, "--tokens", "300B", "--price", "tpu-v3=8")
    seconds = 300e9 / found["predicted"]["tokens_per_second"]
    assert found["training"] == pytest.approx(
        {
            "tokens": 300e9,
            "seconds": seconds,
            "chip_hours": 2 * seconds / 3600,
            "price": 8.0,
            "money": 16 * seconds / 3600,
        }
    )
    assert result(*COST, "--price", "8")["training"]["money"] == 16  # an hour
    assert "training" not in result(*COST)


def test_virtual_devices_are_one_machine(result: Callable[..., dict[str, Any]]) -> None:
    found = result("cost", "examples/mlp.py", "--mesh", "data:4", "--price", "2")
    assert found["training"]["chip_hours"] == 1


def test_a_plans_bill_and_its_reports(run: Callable[..., Result], tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    done = run("search", *LM, "--mesh", "data:2", "--tokens", "1B", "--price", "4.2", "--out", str(plan))
    assert re.search(
        r"^training +1\sB tokens take .*: [\d.,]+ chip-hours, [\d.,]+ at 4.2 each", done.stdout, re.M
    )
    assert run("report", str(plan), "--out", str(page)).exit_code == 0
    assert "1\u00a0B tokens take" in page.read_text(encoding="utf-8")
    assert run("report", str(plan), "--out", str(page), "--tokens", "2T").exit_code == 0
    assert "2\u00a0T tokens take" in page.read_text(encoding="utf-8")


def test_wrong_ones(refused: Callable[..., str]) -> None:
    assert "'v3' is not the hardware of this command; known: tpu-v3" in refused(*COST, "--price", "v3=4")
    assert "--tokens 'many' is not a number; write for example --tokens 300B" in refused(
        *COST, "--tokens", "many"
    )
    assert "--price '-1'" in refused(*COST, "--price=-1")
    mlp = ("search", "examples/mlp.py", "--mesh", "data:2", "--tokens", "1B")
    assert (
        "the model does not define its tokens; name the dimensions that count tokens, e.g. Model"
        in refused(*mlp)
    )
