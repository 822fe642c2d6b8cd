"""`search --diloco`: DiLoCo replicas in plans that are compared, explained and trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from layoutopt.optimize.heuristics.incumbents import Incumbents

MLP = ("examples/mlp.py", "--set", "batch=16")
HERE = ("--mesh", "sites:2;data:2", "--hardware", "tpu-v5e", "--microbatches", "1", "--recompute", "never")


@pytest.mark.nightly
def test_ways_are_compared_and_the_plan_says_them(
    result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    out = str(tmp_path / "plan.json")
    asked = ("--diloco", "never", "--diloco", "sites:period=30", "--out", out)
    found = result("search", *MLP, *HERE, *asked)
    ways = found["details"]["ways"]["compared"]
    assert sorted(w["name"] for w in ways) == ["sites, every 30 steps", "synchronous"]
    assert {w["replicas"]: w["hparams"] for w in ways} == {1: {"batch": 16}, 2: {"batch": 8}}
    assert ways[0]["step_seconds"] == found["predicted"]["step_seconds"] <= ways[1]["step_seconds"]
    assert result("explain", out)["agrees"]


@pytest.mark.parametrize("ways", [("never",), ("never", "sites:period=30")])
@pytest.mark.one_in(2)
def test_every_way_starts_with_the_given_plan(
    ways: tuple[str, ...], run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "plan.json")
    assert run("search", *MLP, *HERE, "--out", out).exit_code == 0
    offered: list[bool] = []
    monkeypatch.setattr(Incumbents, "know", lambda self, start: offered.append(start.start is not None))
    asked = [word for way in ways for word in ("--diloco", way)]
    assert run("search", "--like", out, *asked).exit_code == 0
    assert offered == [True] * len(ways)


@pytest.mark.nightly
def test_a_plan_with_replicas_is_trained(
    result: Callable[..., dict[str, Any]], run: Callable[..., Result], tmp_path: Path
) -> None:
    out = str(tmp_path / "plan.json")
    found = result("search", *MLP, *HERE, "--diloco", "sites:period=2", "--out", out)
    assert found["diloco"] == "sites:period=2,rate=0.7,momentum=0.9"
    priced = result("cost", *MLP, "--layout", out, "--hardware", "tpu-v5e")
    assert priced["predicted"]["step_seconds"] == pytest.approx(found["predicted"]["step_seconds"])
    shown = run("cost", *MLP, "--layout", out, "--hardware", "tpu-v5e")
    assert "replica:sites" not in shown.stdout and "train separately and synchronise rarely" in shown.stdout
    changed = result("explain", out, "--sensitivity")["sensitivity"]
    assert [curve["factor"] for curve in changed] == ["bandwidth", "memory"]  # replicas name an axis
    trained = result("train", *MLP, "--layout", out, "--steps", "4", "--held-out", "0")
    assert trained["steps"] == 4
    assert json.loads(Path(out).read_text())["diloco"] == found["diloco"]
    shown = run("search", *MLP, *HERE, "--diloco", "free", "--out", out)
    assert shown.exit_code == 0 and "Settings of synchronisation" in shown.stdout
    shown = run("explain", out)
    assert shown.exit_code == 0 and "Synchronisation of " in shown.stdout and "Gbit/s" in shown.stdout
    refused = run("search", *MLP, *HERE, "--diloco", "sites:period=30", "--accept-loss", "0.1")
    assert refused.exit_code == 2 and "--accept-loss compares several --diloco" in refused.stderr
