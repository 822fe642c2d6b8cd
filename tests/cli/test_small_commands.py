"""`init` and `solve-problem`."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from layoutopt.cli.init import example_files, example_home, example_names
from layoutopt.cli.solve_problem import FIRST
from layoutopt.models.loading import load_model
from layoutopt.runtime.clock import LEAST
from layoutopt.solver import Problem, Solution, Status, solve

PROBLEM: dict[str, Any] = {
    "format": "layoutopt-problem/1",
    "name": "two",
    "variables": [{"name": "batch", "labels": ["data", "none"]}, {"name": "heads", "size": 3}],
    "terms": [
        {"name": "attention", "scope": [0, 1], "table": [[1, 2.5, 9], [None, 0, 4]]},
        {"name": "rest", "scope": [0], "table": [2, 3]},
    ],
    "rows": [{"name": "memory", "limit": 10, "entries": [{"scope": [0], "table": [4, 8]}]}],
}


def problem(folder: Path, limit: float = 10) -> str:
    data = {**PROBLEM, "rows": [{**PROBLEM["rows"][0], "limit": limit}]}
    (folder / "problem.json").write_text(json.dumps(data), encoding="utf-8")
    return str(folder / "problem.json")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [(), ("--jax",), ("--torch",)])
def test_init_writes_a_model_that_works(
    run: Callable[..., Result], tmp_path: Path, kind: tuple[str, ...]
) -> None:
    file = tmp_path / "new" / "model.py"
    done = run("init", str(file), *kind)
    assert (done.exit_code, done.stdout.strip()) == (0, str(file))
    assert f"next: layoutopt search {file}" in done.stderr
    found = load_model(str(file), ["batch=8"])
    assert found.model.parameters == 32 * 256 + 256 + 256 * 8
    batch, held_out = next(found.data()), next(found.data("held-out"))
    assert batch["x"].shape == (8, 32)
    assert (batch["x"] != held_out["x"]).any()
    assert (
        run("cost", str(file), "--mesh", "data:2;model:4", "--layout", "batch:data;hidden:model").exit_code
        == 0
    )


def test_init_keeps_what_is_there(
    run: Callable[..., Result], refused: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    file.write_text("mine", encoding="utf-8")
    assert "already exists; choose another name, or add --force to overwrite the file" in refused(
        "init", str(file)
    )
    assert file.read_text(encoding="utf-8") == "mine"
    assert run("init", str(file), "--force", "--quiet").stderr == ""
    assert "def model(" in file.read_text(encoding="utf-8")
    assert "does not end in .py" in refused("init", str(tmp_path / "model.txt"))


def test_an_example_comes_with_what_it_imports(
    run: Callable[..., Result], refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("init", "--example", "transformer_lm")
    written = [f"examples/{name}.py" for name in ("transformer_lm", "training", "text", "__init__")]
    assert (done.exit_code, done.stdout.splitlines()) == (0, written)
    assert 'next: layoutopt search examples/transformer_lm.py --mesh "data:2;model:4"' in done.stderr
    for file in written:
        assert (tmp_path / file).read_bytes() == (example_home().parent / file).read_bytes()
    # Another example needs the same helpers; one that was changed stays as it is.
    assert run("init", "--example", "bert").exit_code == 0
    (tmp_path / "examples/text.py").write_text("mine", encoding="utf-8")
    said = refused("init", "--example", "bert")
    assert said == "'examples/text.py' already exists; add --force to overwrite the file"
    assert (tmp_path / "examples/text.py").read_text(encoding="utf-8") == "mine"
    assert run("init", "--example", "bert", "--force").exit_code == 0


def test_an_example_that_is_not_there(refused: Callable[..., str]) -> None:
    said = refused("init", "--example", "transformer")
    assert said.startswith("--example 'transformer' is not a known example; did you mean 'transformer_")
    assert "known: bert, clip," in said and "text" not in said.replace("transformer_", "")
    assert "remove 'x.py'" in refused("init", "x.py", "--example", "mlp")
    for kind in ("--jax", "--torch"):
        assert f"remove {kind}" in refused("init", kind, "--example", "mlp")


def test_every_example_is_whole() -> None:
    """What an example imports of the folder is among its files."""
    for name in example_names():
        found = [file.name for file in example_files(name)]
        assert found[0] == f"{name}.py" and found[-1] == "__init__.py"
        text = "".join(file.read_text(encoding="utf-8") for file in example_files(name))
        assert {f"{word}.py" for word in re.findall(r"from examples\.(\w+) import", text)} <= set(found)


@pytest.mark.parametrize("solver", ["auto", "cp-sat", "highs"])
def test_solve_problem(result: Callable[..., dict[str, Any]], tmp_path: Path, solver: str) -> None:
    found = result("solve-problem", problem(tmp_path), "--solver", solver)
    assert list(found) == ["format", "name", "solver", "choices"]
    assert (found["name"], found["choices"]) == ("two", [0, 0])
    assert found["solver"]["status"] == "OPTIMAL"
    assert (found["solver"]["objective"], found["solver"]["bound"], found["solver"]["gap"]) == (3, 3, 0)
    assert found["solver"]["wall_seconds"] >= 0


def test_solve_problem_for_people(run: Callable[..., Result], tmp_path: Path) -> None:
    shown = run("solve-problem", problem(tmp_path)).stdout
    assert "at least 3 (gap 0%): OPTIMAL" in shown
    assert "batch" in shown and "data" in shown


def test_a_file_that_takes_longer_than_the_limit_is_not_waited_for(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)

    monkeypatch.setattr("layoutopt.solver.load", slow)
    file = problem(tmp_path)
    line = refused("solve-problem", file, "--time-limit", "0.5", code=4)
    assert "passed while loading; raise it, e.g. --time-limit 5" in line


@pytest.mark.parametrize(("nothing", "limits"), [(False, [LEAST]), (True, [LEAST, FIRST])])
def test_where_reading_took_the_limit_only_a_first_answer_has_more_time(
    result: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nothing: bool,
    limits: list[float],
) -> None:
    asked: list[float | None] = []

    def solved(problem: Problem, solver: str, limit: float | None, *more: Any) -> Solution:
        asked.append(limit)
        if nothing and len(asked) == 1:
            return Solution(Status.LIMIT, None, math.inf, 0.0, 0.0, "none")
        return solve(problem, solver, 60.0, *more)

    monkeypatch.setattr("layoutopt.solver.solve", solved)
    monkeypatch.setattr("layoutopt.runtime.clock.began", time.monotonic() - 100)
    found = result("solve-problem", problem(tmp_path), "--time-limit", "100")
    assert (found["choices"], asked) == ([0, 0], limits)


def test_an_infeasible_problem_names_its_rows(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused("solve-problem", problem(tmp_path, limit=3), code=3)
    assert line == (
        "problem 'two' is proven infeasible: these rows conflict: 'memory' (limit 3); "
        "raise the limit of one of these rows"
    )


def test_other_problems_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "cannot be read" in refused("solve-problem", str(tmp_path / "none.json"))
    assert "--time-limit: '-1' is not a positive time" in refused(
        "solve-problem", problem(tmp_path), "--time-limit", "-1"
    )
    file = tmp_path / "broken.json"
    file.write_text("{", encoding="utf-8")
    assert "is not valid JSON" in refused("solve-problem", str(file))
