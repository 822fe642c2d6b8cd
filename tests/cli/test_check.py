"""`layoutopt check`: bounds on a plan's or a layout's predicted time and memory, for CI."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import layoutopt
from examples import mlp
from layoutopt.cli.check import longest_step, most_memory
from layoutopt.plan.units import seconds_text

GiB = 1 << 30
LAYOUT = ("examples/mlp.py", "--mesh", "data:4", "--layout", "batch:data", "--hardware", "tpu-v5e")


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    found = layoutopt.search(mlp.model(), mesh="data:4", hardware="tpu-v5e")
    found.save(tmp_path / "plan.json")
    return found


def bounds(found: dict[str, Any]) -> dict[str, tuple[float, float, bool]]:
    return {each["name"]: (each["bound"], each["found"], each["ok"]) for each in found["bounds"]}


def test_a_layout_is_held_to_what_cost_predicts(result: Callable[..., Any]) -> None:
    found = result("check", *LAYOUT, "--max-memory", "50%", "--max-step", "3s")
    predicted = result("cost", *LAYOUT)["predicted"]
    memory = layoutopt.cost(mlp.model(), "data:4", "batch:data", hardware="tpu-v5e").limit
    assert found["ok"] is True
    assert bounds(found) == {
        "memory": (memory / 2, predicted["peak_memory_bytes"], True),
        "step": (3.0, predicted["step_seconds"], True),
    }


@pytest.mark.parametrize(
    ("given", "broken"),
    [
        (("--max-step", "1ns"), {"step"}),
        (("--max-memory", "1KiB"), {"memory"}),
        (("--max-memory", "0.0001%", "--max-step", "1 us"), {"memory", "step"}),
    ],
)
def test_a_broken_bound_ends_in_6(run: Callable[..., Any], given: tuple[str, ...], broken: set[str]) -> None:
    done = run("check", *LAYOUT, *given, "--json")
    assert done.exit_code == 6
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert {name for name, (_, _, ok) in bounds(found).items() if not ok} == broken
    told = json.loads(done.stderr)
    assert told["exit"] == 6 and all(f"--max-{name}" in told["error"] for name in broken)


def test_a_plan_is_held_to_a_baseline(run: Callable[..., Any], plan: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    model = ("--model", "examples/mlp.py")
    assert run("check", path, *model, "--max-step", f"1.001x={path}").exit_code == 0
    assert run("check", path, *model, "--max-step", f"0.999x={path}").exit_code == 6
    assert longest_step(f"2x={path}") == 2 * plan.predicted.step_seconds


@pytest.mark.one_in(2)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_plan_passes_as_its_own_baseline(run: Callable[..., Any], tmp_path: Path, framework: str) -> None:
    """Also where the host takes longer to launch kernels than they do, as in eager PyTorch."""
    path = str(tmp_path / "plan.json")
    found = layoutopt.search(mlp.model(), devices=2, hardware="h100", framework=framework, allow="usual")
    found.save(path)
    least, kernels = found.predicted.step_seconds, found.predicted.device_seconds
    assert (least > kernels) == (framework == "torch") and least == (found.predicted.host_seconds or kernels)
    given = ("check", path, "--model", "examples/mlp.py", "--max-step")
    assert run(*given, f"1.001x={path}").exit_code == 0
    assert run(*given, f"0.999x={path}").exit_code == 6
    assert f"{seconds_text(least)} a step" in repr(found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("given", "hardware", "framework"),
    [
        ((), "h100", "torch"),
        (("--hardware", "h200"), "h200", "torch"),
        (("--framework", "megatron"), "h100", "megatron"),
        (("--hardware", "cpu-local", "--framework", "layoutopt"), "cpu-local", "layoutopt"),
    ],
)
def test_a_plan_keeps_its_hardware_and_framework_unless_others_are_named(
    result: Callable[..., Any], tmp_path: Path, given: tuple[str, ...], hardware: str, framework: str
) -> None:
    path = tmp_path / "plan.json"
    layoutopt.search(mlp.model(), mesh="data:4", hardware="h100", framework="torch").save(path)
    found = result("check", str(path), "--model", "examples/mlp.py", *given)
    assert (found["hardware"], found["framework"]) == (hardware, framework)


def test_what_lies_on_the_hosts_is_held_to_their_memory(run: Callable[..., Any]) -> None:
    asked = ("check", *LAYOUT, "--offload", "optimizer", "--json")
    for memory, code in (("1GB", 0), ("1KiB", 6)):
        done = run(*asked, "--set-hardware", f"host_memory={memory}")
        assert done.exit_code == code, done.stderr
        assert bounds(json.loads(done.stdout))["host memory"][2] is (code == 0)


@pytest.mark.parametrize(
    "given",
    [
        ("--max-step", "2.5"),
        ("--max-step", "-1s"),
        ("--max-step", "2 parsec"),
        ("--max-step", "plan.json"),
        ("--max-step", "x=plan.json"),
        ("--max-step", "nanx=plan.json"),
        ("--max-step", "2x="),
        ("--max-step", "2x=nowhere.json"),
        ("--max-memory", "0%"),
        ("--max-memory", "101%"),
        ("--max-memory", "nan%"),
        ("--max-memory", "much"),
    ],
)
def test_bad_bounds_are_refused(refused: Callable[..., str], given: tuple[str, str]) -> None:
    said = refused("check", *LAYOUT, *given)
    assert given[0] in said or "nowhere.json" in said


def test_shares_and_amounts() -> None:
    assert most_memory(None, 5.0) == 5.0
    assert most_memory(" 12.5% ", 16 * GiB) == 2 * GiB
    assert most_memory("3GiB", GiB) == 3 * GiB
