"""`--offload`: by hand, in a search under a limit, in plans that are trained and explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

LM = "examples/transformer_lm.py"
SIZES = ("layers=2", "d_model=32", "d_ff=64", "d_kv=8", "heads=4", "length=16", "batch=4", "vocab=32")
SETS = tuple(word for size in SIZES for word in ("--set", size))
HERE = ("--hardware", "tpu-v5e", "--mesh", "data:2")


@pytest.mark.nightly
def test_by_hand(result: Callable[..., dict[str, Any]], run: Callable[..., Result]) -> None:
    plain, found = (result("cost", LM, *SETS, *HERE, *words) for words in ((), ("--offload", "optimizer")))
    before, after = plain["predicted"], found["predicted"]
    moved = after["host_bytes_per_device"]
    assert moved == {"host_load": after["host_memory_bytes"], "host_store": after["host_memory_bytes"]}
    assert after["step_seconds"] > before["step_seconds"] and "host_memory_bytes" not in before
    assert after["peak_memory_bytes"] < before["peak_memory_bytes"]
    assert "feed_forward/wi" in found["offload"]["optimizer"] and "offload" not in plain
    one = result("cost", LM, *SETS, *HERE, "--offload", "optimizer=feed_forward/wi")
    assert one["offload"] == {"optimizer": ["feed_forward/wi"]}
    refused = run("cost", LM, *SETS, *HERE, "--offload", "weight")
    assert (
        refused.exit_code == 2 and "offload: unknown kind 'weight'; did you mean 'weights'?" in refused.stderr
    )


@pytest.mark.nightly
def test_a_plan_says_it_and_is_trained(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    asked = ("--recompute", "never", "--microbatches", "1", "--storage", "layout", "--pin", "batch:data")
    least = result("search", LM, *SETS, *HERE, *asked, "--objective", "memory")["predicted"]
    out, limit = str(tmp_path / "plan.json"), f"{least['peak_memory_bytes'] - 4096}B"
    nothing = run("search", LM, *SETS, *HERE, *asked, "--memory", limit)
    assert nothing.exit_code == 3
    here = (*HERE, *asked, "--memory", limit, "--offload", "optimizer")
    plan = result("search", LM, *SETS, *here, "--out", out)
    assert plan["solver"]["status"] == "OPTIMAL" and plan["offload"]["optimizer"]
    assert plan["details"]["search"]["offload"] == ["optimizer"]
    explained = run("explain", out)
    assert explained.exit_code == 0 and "predicted again from the model: the same" in explained.stdout
    trained = run("train", LM, *SETS, "--layout", out, "--steps", "2", "--engine", "lockstep")
    assert trained.exit_code == 0, trained.stderr
    refused = run("export", out, "--to", "jax")
    assert refused.exit_code == 2 and "optimizer offload applies to" in refused.stderr.replace("\n", " ")
