"""`search --pipeline`, and what other commands make of its plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

LM = "examples/transformer_lm.py"
SIZES = ("layers=4", "d_model=16", "d_ff=32", "d_kv=4", "heads=4", "length=8", "batch=8", "vocab=16")
SETS = tuple(word for size in SIZES for word in ("--set", size))
ON = ("--mesh", "pipe:2;data:2", "--hardware", "tpu-v3")
PINS = ("--pin", "layers:pipe", "--pin", "batch:data", "--storage", "layout", "--microbatches", "2,4")


@pytest.mark.nightly
def test_a_plan_with_stages(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    done = run("search", LM, *SETS, *ON, "--pipeline", "layers", *PINS, "--out", str(plan))
    assert done.exit_code == 0, done.stderr
    assert "pipe: pipeline; data: data" in done.stdout and "2 stages of layers" in done.stdout
    told = json.loads(plan.read_text())
    assert told["pipeline"] == {"layers": 2} and told["solver"]["status"] == "OPTIMAL"
    explained = run("explain", str(plan)).stdout
    assert "each of the 2 stages of 'layers' is idle in 1 of" in explained
    assert result("explain", str(plan))["agrees"]
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps({**told, "pipeline": {}}))
    for file, model in ((plan, ()), (edited, ("--model", LM))):
        refused = run("export", str(file), "--to", "maxtext", *model)
        assert refused.exit_code == 2 and "pipeline stages" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--pipeline", "layer"),
            "--pipeline layer: no loop over layers has this dimension; did you mean 'layers'?",
        ),
        (
            ("--pipeline", "layers", "--mesh", "pipe:8"),
            "--pipeline layers is not possible (pipeline over 'layers': 8 stages are too many ",
        ),
        (
            ("--pipeline", "layers", "--schedule", "circular:3", "--set", "layers=1"),
            "are too many for a loop of 1 layer",
        ),
        (
            ("--pipeline", "layers", "--forbid", "layers:pipe+data"),
            "no mesh has an axis that may split the layers",
        ),
        (("--pipeline", "layers", "--schedule", "1f1n"), "did you mean '1f1b'?"),
        (("--pipeline", "layers", "--schedule", "circular"), "e.g. circular:2"),
        (
            ("--pipeline", "layers", "--schedule", "circular:4"),
            "stages times 4 rounds are too many for a loop of 4 layer",
        ),
        (("--schedule", "gpipe,circular:2"), "circular:2 needs --pipeline; add"),
        (("--pipeline", "layers", "--schedule", "interleaved:1"), "e.g. interleaved:2"),
        (
            ("--pipeline", "layers", "--pin", "layers:pipe", "--pin", "batch:pipe"),
            "pipeline stages use these axes",
        ),
    ],
)
def test_what_is_refused(words: tuple[str, ...], said: str, run: Callable[..., Result]) -> None:
    done = run("search", LM, *SETS, *ON, *words)
    assert done.exit_code == 2 and said in done.stderr, done.stderr
