"""`report`: one page of plans, whether they bring their details or not; `search --report` makes the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from layoutopt.cli import app
from reports import figures

SEARCH = ("search", "examples/mlp.py", "--mesh", "data:2;model:2", "--microbatches", "1", "--quiet")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan file, the same plan as `--json` prints it, and the report of `search`."""
    folder = tmp_path_factory.mktemp("plans")
    args = [*SEARCH, "--json", "--out", str(folder / "plan.json"), "--report", str(folder / "search.html")]
    done = CliRunner().invoke(app, args)
    assert (done.exit_code, done.stderr) == (0, "")
    (folder / "printed.json").write_text(done.stdout, encoding="utf-8")
    return folder


def undated(page: Path) -> str:
    return re.sub(r"\d{4}-\d{2}-\d{2}", "", page.read_text(encoding="utf-8"))


def test_the_page_shows_the_answer(run: Callable[..., Result], written: Path) -> None:
    out = written / "report.html"
    done = run("report", str(written / "plan.json"), "--out", str(out))
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    assert f"wrote the report to {out}" in done.stderr
    page = out.read_text(encoding="utf-8")
    plan = json.loads((written / "plan.json").read_text(encoding="utf-8"))
    for dim, axes in plan["layout"].items():
        assert dim in page and all(axis in page for axis in axes)
    assert "layer_0/weight" in page
    assert undated(out) == undated(written / "search.html")


def test_details_are_worked_out_from_the_model(
    run: Callable[..., Result], written: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    assert run("report", str(written / "printed.json"), "--out", str(out)).exit_code == 0
    assert undated(out) == undated(written / "search.html")
    bare = json.loads((written / "printed.json").read_text(encoding="utf-8"))
    bare["details"] = {"search": bare["details"]["search"]}
    (tmp_path / "bare.json").write_text(json.dumps(bare), encoding="utf-8")
    done = run("report", str(tmp_path / "bare.json"), "--out", str(out))
    assert done.exit_code == 0
    assert "--model MODEL, to add variables, operations and memory to the report" in done.stderr
    assert 'id="pieces" class="absent"' in out.read_text(encoding="utf-8")
    done = run("report", str(tmp_path / "bare.json"), "--out", str(out), "--model", "examples/mlp.py")
    assert undated(out) == undated(written / "search.html")


@pytest.mark.nightly
def test_several_plans_figures_and_tables(
    result: Callable[..., dict[str, Any]], written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reports.figures.ALL", figures.ALL[:3])  # each takes half a second as PDF
    plan = str(written / "plan.json")
    found = result(
        "report",
        plan,
        plan,
        "--out",
        str(tmp_path / "both.html"),
        "--figures",
        str(tmp_path / "figures"),
        "--tables",
        str(tmp_path / "tables"),
    )
    files = [Path(name) for name in found["files"]]
    assert files[0] == tmp_path / "both.html"
    assert all(file.stat().st_size > 0 for file in files)
    assert {".html", ".svg", ".png", ".pdf", ".csv"} == {file.suffix for file in files}


def test_wrong_files(refused: Callable[..., str], written: Path, tmp_path: Path) -> None:
    plan = str(written / "plan.json")
    cut = tmp_path / "cut.json"
    cut.write_text((written / "plan.json").read_text(encoding="utf-8")[:500], encoding="utf-8")
    assert f"plan {str(cut)!r} is not valid JSON" in refused("report", str(cut))
    old = tmp_path / "old.json"
    old.write_text('{"format": "layoutopt-plan/0"}', encoding="utf-8")
    assert "has format 'layoutopt-plan/0', but this version of layoutopt reads" in refused("report", str(old))
    assert "it is a folder; name a file" in refused("report", plan, "--out", str(tmp_path))
    assert "--validation 'none.json' cannot be read" in refused(
        "report", plan, "--validation", "none.json", "-q"
    )
    line = refused("report", str(written / "printed.json"), "--model", "examples/transformer_lm.py")
    assert "has no hyperparameter 'hidden'" in line
