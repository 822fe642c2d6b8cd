"""Options that give others their values: targets of `layoutopt.toml`, and searches like that of a plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from layoutopt.cli.application import _Commands
from layoutopt.cli.defaults import FILE, SOURCES
from layoutopt.plan.build import load_plan
from layoutopt.space.decisions import SearchSpace
from tests.cli.conftest import ROOT

TARGET = """
[targets.pod]
mesh = {data = 2, model = 2}
hardware = "tpu-v3"
allow = ["+collective_matmul", "-zero"]
pin = {batch = "data"}
memory = "1GiB"
layout = {batch = "data"}
microbatches = [1, 2]
quiet = true
set = {batch = 128}

[targets.pod.cost]
storage = "zero3"

[targets.small]
devices = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and its targets, as the working directory."""
    shutil.copy(ROOT / "examples/mlp.py", tmp_path / "model.py")
    (tmp_path / FILE).write_text(TARGET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_target_is_the_same_as_its_options(result: Callable[..., dict[str, Any]], folder: Path) -> None:
    typed = "--mesh data:2;model:2 --set batch=128 --hardware tpu-v3 --memory 1GiB"
    chosen = "--allow +collective_matmul --allow -zero --pin batch:data --microbatches 1,2"
    one = result("search", "model.py", "--target", "pod")
    other = result("search", "model.py", *typed.split(), *chosen.split())
    assert one["details"]["search"]["command"] == other["details"]["search"]["command"]
    assert one["layout"] == other["layout"] and one["predicted"] == other["predicted"]
    found = result("cost", "model.py", "--target", "pod")
    given = "--layout batch:data --storage zero3"
    assert found == result("cost", "model.py", *typed.split(), *given.split())
    assert {*found["storage"].values()} == {"zero3"}


def test_typed_options_count_more_than_a_target(result: Callable[..., dict[str, Any]], folder: Path) -> None:
    found = result("search", "model.py", "--target", "pod", "--devices", "2")
    asked = found["details"]["search"]
    assert (asked["devices"], asked["pins"], asked["hardware"]) == (2, None, "tpu-v3")
    found = result("search", "model.py", "--target", "small", "--mesh", "x:2", "--hardware", "tpu-v2")
    assert found["mesh"] == {"x": 2} and found["details"]["search"]["devices"] is None


def test_a_target_is_found_beside_the_model_else_in_the_current_folder(
    result: Callable[..., dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    own = result("cost", str(folder / "model.py:model"), "--target", "pod")
    monkeypatch.chdir(folder)
    assert own == result("cost", "model.py", "--target", "pod")
    assert result("cost", str(ROOT / "examples/mlp.py"), "--target", "pod")["mesh"] == own["mesh"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must contain only tables [targets.NAME] of options, but contains no such table"),
        ("devices = 2", "must contain only tables [targets.NAME] of options, but also contains devices"),
        ("[targets.prod]", "--target pod: layoutopt.toml has no target of this name; did you mean 'prod'?"),
        ("[targets]\npod = 3", "target 'pod' must be a table of options, [targets.pod], but is 3"),
        ("[targets.pod]\ndevcies = 3", "no command has the option --devcies; did you mean --devices?"),
        ("[targets.pod]\nquiet = 1", "quiet = 1: must be true or false"),
        ("[targets.pod]\ndevices = true", "devices = True: must be a string, a"),
        ("[targets.pod", "is not a valid TOML file: "),
    ],
)
def test_a_wrong_file_is_said_in_one_line(
    refused: Callable[..., str], folder: Path, text: str, said: str
) -> None:
    (folder / FILE).write_text(text, encoding="utf-8")
    assert said in refused("search", "model.py", "--target", "pod")


def test_a_missing_file_is_said(refused: Callable[..., str]) -> None:
    assert "no file layoutopt.toml beside the model" in refused("cost", "examples/mlp.py", "--target", "x")


def test_every_command_with_a_model_takes_targets() -> None:
    for name, command in _Commands().items():
        names = {param.name for param in command.params}
        assert ("target" in names) == ("model" in names or name == "calibrate"), name
        assert ("like" in names) == (name == SOURCES["like"].only)


def test_a_command_with_a_target_of_its_own_keeps_it(refused: Callable[..., str], folder: Path) -> None:
    assert "'tpu-v9'" in refused("calibrate", "--target", "tpu-v9")


def test_like_a_plan_is_its_search_again(run: Callable[..., Result], folder: Path) -> None:
    for number, words in enumerate((["--devices", "2", "--storage", "layout"], ["--target", "pod"])):
        first, again = folder / f"{number}.json", folder / f"again {number}.json"
        assert run("search", "model.py", *words, "--out", str(first)).exit_code == 0
        assert run("search", "--like", str(first), "--out", str(again)).exit_code == 0
        one, other = load_plan(first), load_plan(again)
        assert one.data.layout == other.data.layout and one.data.model == other.data.model
        assert one.question.model_copy(update={"command": ""}) == other.question.model_copy(
            update={"command": ""}
        )
        assert one.allowed == other.allowed != SearchSpace()


def test_like_a_plan_on_other_devices_has_their_microbatches(
    run: Callable[..., Result], folder: Path
) -> None:
    """Those that nobody gave; given ones stay."""
    search = ("search", "model.py", "--hardware", "tpu-v3", "--allow", "usual", "--set", "batch=480")
    for more, on_48, on_32 in (
        ((), (1, 2, 5, 10, 20, 40), (1, 3, 5, 15, 30)),
        (("--microbatches", "1,3"), (1, 3), (1, 3)),
    ):
        first, again = folder / "first.json", folder / "again.json"
        assert run(*search, "--mesh", "data:48", *more, "--out", str(first)).exit_code == 0
        like = ("search", "--like", str(first), "--mesh", "data:32", "--allow", "usual", "--out", str(again))
        assert run(*like).exit_code == 0
        assert [load_plan(each).question.microbatches for each in (first, again)] == [on_48, on_32]


@pytest.mark.nightly
def test_what_is_typed_counts_more_than_a_plan(run: Callable[..., Result], folder: Path) -> None:
    first = folder / "plan.json"
    assert run("search", "model.py", "--target", "pod", "--out", str(first)).exit_code == 0
    done = run("search", "--like", str(first), "--mesh", "a:2", "--pin", "batch:a", "--json")
    found = json.loads(done.stdout)
    assert found["mesh"] == {"a": 2} and found["model"]["hparams"]["batch"] == 128
    done = run("search", str(ROOT / "examples/mlp.py"), "--like", str(first), "--json")
    found = json.loads(done.stdout)
    assert found["hardware"] == "tpu-v3" and found["model"]["hparams"]["batch"] == 64


def test_a_plan_does_not_decide_what_runs(
    run: Callable[..., Result], refused: Callable[..., str], folder: Path
) -> None:
    first = folder / "plan.json"
    assert run("search", "model.py", "--target", "small", "--out", str(first)).exit_code == 0
    with open(folder / "model.py", "a", encoding="utf-8") as more:
        more.write("# another text\n")
    said = refused("search", "--like", str(first))
    assert said.endswith("name the model yourself, with search MODEL --like PLAN")
    assert run("search", "model.py", "--like", str(first)).exit_code == 0
