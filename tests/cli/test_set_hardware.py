"""`--set-hardware`: another number in a machine, and the plan that remembers it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

SMALL = ["examples/mlp.py", "--mesh", "data:16", "--set", "batch=64"]
SLOW = ["--hardware", "a100", "--set-hardware", "node_egress=1GB/s"]


def seconds(done: Result) -> float:
    assert done.exit_code == 0, done.stderr
    return float(json.loads(done.stdout)["predicted"]["step_seconds"])


def test_a_slower_network_makes_a_slower_step(run: Callable[..., Result]) -> None:
    shown = ["cost", *SMALL, "--layout", "batch:data", "--json"]
    assert seconds(run(*shown, *SLOW)) > seconds(run(*shown, "--hardware", "a100"))


def test_a_plan_is_opened_again_with_what_was_set(run: Callable[..., Result], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    searched = run("search", *SMALL, *SLOW, "--microbatches", "1", "--out", str(out), "--json")
    assert searched.exit_code == 0, searched.stderr
    assert json.loads(out.read_text())["hardware"] == "a100, node_egress=1GB/s"
    explained = run("explain", str(out), "--check", "--json")
    assert explained.exit_code == 0, explained.stderr


def test_the_machine_is_shown_with_it(run: Callable[..., Result]) -> None:
    done = run("hardware", "a100", "--set-hardware", "node_egress=100GB/s")
    assert "100 GB/s" in done.stdout and "set by the user" in done.stdout


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", ["cost", "lint"])
def test_a_plan_is_priced_on_its_own_hardware(
    result: Callable[..., dict[str, Any]], tmp_path: Path, command: str
) -> None:
    """Unless another one is named, as in Python."""
    out = tmp_path / "plan.json"
    found = result("search", *SMALL, "--hardware", "a100", "--microbatches", "1", "--out", str(out))
    asked = (command, "examples/mlp.py", "--set", "batch=64", "--layout", str(out))
    own = result(*asked)
    assert (own["hardware"], own["predicted"]) == ("a100", found["predicted"])
    assert result(*asked, "--hardware", "h100")["hardware"] == "h100"
