"""Running the command line, in this process and as users do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from layoutopt.cli import app

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


@pytest.fixture
def result(run: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """Runs a command with `--json` and gives the one object on stdout."""

    def invoke(*args: str) -> dict[str, Any]:
        done = run(*args, "--json")
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, dict)
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
        assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
        return lines[0].removeprefix("error: ")

    return invoke
