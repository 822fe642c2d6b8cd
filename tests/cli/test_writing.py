"""Files that commands write: whole or the old ones, and the result is shown whatever happens to them."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from layoutopt.cli import app
from layoutopt.plan.results import ValidateResult
from mesh_tf_core import files
from tests.reports import sample

MLP = "examples/mlp.py"
SEARCH = ("search", MLP, "--mesh", "data:2", "--microbatches", "1", "--storage", "layout")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with details."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    done = CliRunner().invoke(app, [*SEARCH, "--out", str(path), "--quiet"])
    assert done.exit_code == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def profile_content() -> Any:
    """A profile, fitted once for all commands that would measure one."""
    from costmodels.calibration.clock import ClockNoise
    from costmodels.calibration.profile import profile
    from costmodels.calibration.runner import assemble
    from tests.costmodels.calibration import test_fit

    found = test_fit.measured()
    records = [{"name": name, **m} for name, m in found.items()]
    return profile(assemble(test_fit.MESH), test_fit.fitted(found), records, ClockNoise(0.0, 0.0), quick=True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, profile_content: Any) -> None:
    """What takes devices, or a compiler, was done already."""
    monkeypatch.setattr("costmodels.calibration.calibrate", lambda *_, **__: profile_content)
    monkeypatch.setattr("layoutopt.cli.running.Session.start", lambda *_: None)
    validation = sample.validation()
    for row in validation["rows"]:
        row |= {"name": "x", "spread": 0.0}
    validation["noise"] = {"noisy": False, "words": "quiet machine"}
    validation["notes"] = []
    found = ValidateResult.model_validate(validation)
    monkeypatch.setattr("layoutopt.analysis.validate.validate", lambda *_, **__: found)


WRITERS: dict[str, tuple[tuple[str, ...], str]] = {
    "search": ((*SEARCH, "--out", "OUT"), "the answer"),
    "search --report": ((*SEARCH, "--report", "OUT"), "the answer"),
    "explain": (("explain", "PLAN", "--out", "OUT"), "What each split is worth"),
    "export": (("export", "PLAN", "--to", "jax", "--out", "OUT"), "PartitionSpec"),
    "calibrate --target": (("calibrate", "--target", "tpu-v5e", "--out", "OUT"), "Typical error"),
    "calibrate": (("calibrate", "--mesh", "data:2;model:2", "--out", "OUT"), "matmuls"),
    "validate": (("validate", MLP, "--mesh", "data:2", "--out", "OUT"), "Layouts, by predicted rank"),
    "init": (("init", "OUT", "--force"), ""),
    "report": (("report", "PLAN", "--out", "OUT"), ""),
}
"""Commands that write a file, and a part of what they show besides."""


def written(command: tuple[str, ...], plan: Path, out: Path | str) -> list[str]:
    return [{"OUT": str(out), "PLAN": str(plan)}.get(word, word) for word in command]


@pytest.fixture(params=WRITERS)
def writer(request: pytest.FixtureRequest, measured: None) -> tuple[tuple[str, ...], str]:
    return WRITERS[request.param]


@pytest.mark.one_in(4)
def test_a_full_disk_leaves_the_old_file_and_the_result(
    run: Callable[..., Result],
    writer: tuple[tuple[str, ...], str],
    plan: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, shown = writer
    folder = tmp_path / "out"
    folder.mkdir()
    out = folder / ("model.py" if command[0] == "init" else "file.json")
    out.write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    done = run(*written(command, plan, out))
    assert done.exit_code == 2
    assert shown in done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and errors[0] == done.stderr.splitlines()[-1]
    assert f"{str(out)!r} cannot be written: No space left on device; free some space, or" in errors[0]
    assert out.read_text() == "old" and list(folder.iterdir()) == [out]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("folder", "it is a folder; name a file"),
        ("no/such/file.py", "there is no folder"),
        ("x" * 300 + ".py", "File name too long"),
        ("file.txt/below.py", "Not a directory"),
    ],
)
def test_a_place_that_cannot_be_is_said_before_the_work(
    refused: Callable[..., str],
    writer: tuple[tuple[str, ...], str],
    plan: Path,
    tmp_path: Path,
    place: str,
    said: str,
) -> None:
    command, _ = writer
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / (f"{place}.py" if command[0] == "init" and place == "folder" else place)
    if out.suffix == ".py" and place == "folder":
        out.mkdir()
        before = sorted(tmp_path.rglob("*"))
    line = refused(*written(command, plan, out))
    assert said in line and "cannot be written" in line
    assert sorted(tmp_path.rglob("*")) == before  # no folder was made for nothing


@pytest.mark.one_in(4)
def test_the_files_own_folder_is_made(
    run: Callable[..., Result], writer: tuple[tuple[str, ...], str], plan: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "file.py"
    done = run(*written(writer[0], plan, out))
    assert done.exit_code == 0, done.stderr
    assert out.stat().st_size > 0 and list(out.parent.iterdir()) == [out]


def test_json_is_printed_too_when_the_file_cannot_be(run: Callable[..., Result], plan: Path) -> None:
    for command in (
        (*SEARCH, "--out", "/dev/full"),
        ("export", str(plan), "--to", "jax", "--out", "/dev/full"),
    ):
        done = run(*command, "--json")
        assert done.exit_code == 2 and json.loads(done.stdout)["format"]
        told = json.loads(done.stderr.splitlines()[-1])
        assert told["exit"] == 2 and "'/dev/full' cannot be written: No space left on device" in told["error"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("option", ["--figures", "--tables"])
def test_folders_of_figures_and_tables(
    run: Callable[..., Result],
    plan: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
) -> None:
    page = ("report", str(plan), "--out", str(tmp_path / "r.html"))
    monkeypatch.setattr("reports.files.figures.ALL", ())
    (tmp_path / "file").touch()
    for place, said in (("file", "File exists"), ("no/where", "there is no folder")):
        done = run(*page, option, str(tmp_path / place))
        assert done.exit_code == 2 and said in done.stderr.splitlines()[-1]
        assert not (tmp_path / "no").exists()
    done = run(*page, option, str(tmp_path / "made"))
    assert done.exit_code == 0 and (tmp_path / "made").is_dir()


def test_calibrating_for_a_pipe_keeps_no_partial_results_beside_it(
    run: Callable[..., Result], measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    from costmodels import calibration

    content = calibration.calibrate()
    monkeypatch.setattr("costmodels.calibration.calibrate", lambda *_, **more: asked.update(more) or content)
    assert run("calibrate", "--mesh", "data:2;model:2", "--out", "/dev/null").exit_code == 0
    assert asked["resume"] is None


def test_no_other_code_writes_files() -> None:
    """There is one way to write a file; checkpoints, of many files, have their own."""
    root = Path(__file__).resolve().parents[2]
    way = re.compile(
        r"\.write_text\(|\.write_bytes\(|\bopen\([^)]*[\"'][wax]b?\+?[\"']|savefig\((?!drawn|out)"
    )
    own = {"mesh_tf_core/files.py", "layoutopt/cli/streams.py"}
    found = {
        str(path.relative_to(root))
        for package in ("layoutopt", "costmodels", "mesh_tf_core", "reports")
        for path in (root / package).rglob("*.py")
        if way.search(path.read_text(encoding="utf-8"))
    }
    assert {name for name in found - own if not name.startswith("mesh_tf_core/training/")} == set()
