"""Running the command line, in this process and as users do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from layoutopt.cli import app
from layoutopt.models import source as checked
from layoutopt.plan import hardware_results, layout_results, results, size_results
from layoutopt.plan.fields import Data
from layoutopt.plan.schema import PlanFile

INFEASIBLE = 3
ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).parent / "layoutopt")


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The repository as working directory, an empty cache, and no trace of loaded model files afterwards."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)  # parallel test runners set it for their workers
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    checked.leave()
    for name in set(sys.modules) - modules:
        if name.startswith("_model_"):
            del sys.modules[name]


@pytest.fixture
def run() -> Callable[..., Result]:
    """Runs a command in this process."""

    def invoke(*args: str) -> Result:
        done = CliRunner().invoke(app, list(args), prog_name="layoutopt", catch_exceptions=False)
        assert "Traceback" not in done.stderr
        return done

    return invoke


SCHEMAS: dict[str, type[Data]] = {
    "search": PlanFile,
    "cost": results.CostResult,
    "lint": results.LintResult,
    "candidates": layout_results.CandidatesResult,
    "check": layout_results.CheckResult,
    "learn": layout_results.LearnResult,
    "explain": layout_results.ExplainResult,
    "measure": results.MeasureResult,
    "calibrate": hardware_results.CalibrateResult,
    "validate": results.ValidateResult,
    "verify": results.VerifyResult,
    "lower": results.LowerResult,
    "train": results.TrainResult,
    "generate": results.GenerateResult,
    "report": results.ReportResult,
    "solve-problem": results.SolveProblemResult,
    "export": results.ExportResult,
    "init": results.InitResult,
    "size": size_results.SizeResult,
    "hardware": hardware_results.HardwareList,
}
"""What each command prints."""


def schema_of(args: Sequence[str]) -> type[Data]:
    if args[0] == "hardware" and len(args) > 1:
        return hardware_results.HardwareResult
    of_tpu = args[0] == "calibrate" and "--target" in args
    return hardware_results.CalibrateTpuResult if of_tpu else SCHEMAS[args[0]]


def fits(found: dict[str, Any], schema: type[Data]) -> None:
    """A result is what its schema says: no field is missing, none unknown, and it is written again alike."""
    read = schema.model_validate(found)
    assert read.to_json() == found
    unknown = {name for each in objects(read) for name in each.model_extra or ()}
    assert {name for name in unknown if not name.endswith("_per_second")} == set()


def objects(value: Any) -> Iterator[Data]:
    """Every object of a result that a schema describes."""
    if isinstance(value, Data):
        yield value
        value = dict(value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for inner in inside:
        yield from objects(inner)


@pytest.fixture
def result(run: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """Runs a command with `--json` and gives the one object on stdout."""

    def invoke(*args: str) -> dict[str, Any]:
        done = run(*args, "--json")
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
        assert found["format"] == ("layoutopt-plan/1" if args[0] == "search" else f"layoutopt-{args[0]}/1")
        fits(found, schema_of(args))
        return found

    return invoke


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the installed command in a process of its own."""

    def start(*args: str, cwd: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([COMMAND, *args], capture_output=True, text=True, cwd=cwd, check=False, **more)

    return start


@pytest.fixture
def refused(run: Callable[..., Result]) -> Callable[..., str]:
    """Runs a command that must fail with one line on stderr, and gives that line."""

    def invoke(*args: str, code: int = 2) -> str:
        done = run(*args)
        assert done.exit_code == code, done.stderr or done.stdout
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        if "--json" in args:
            told = json.loads(lines[0])
            more = {"conflict", "repairs", "space"} if code == INFEASIBLE and args[0] == "search" else set()
            assert told.keys() - more == {"error", "exit"} and told["exit"] == code
            return str(told["error"])
        assert lines[0].startswith("error: "), done.stderr
        return lines[0].removeprefix("error: ")

    return invoke
