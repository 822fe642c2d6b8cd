"""Wrong input: one clear line on stderr, nothing on stdout, exit code 2."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.reports import sample

LM = "examples/transformer_lm.py"
ON = (LM, "--mesh", "data:2;model:4")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(
            [*ON, "--layout", "btch:data"],
            "no operation has a dimension 'btch'; did you mean 'batch'? known: batch, d_ff,",
            id="stacked dimensions; use one placeholder for each",
        ),
        pytest.param(
            [*ON, "--layout", "batch:dta"],
            "mesh data:2;model:4 has no axis 'dta'; did you mean 'data'? known: data, model",
            id="unknown axis",
        ),
        pytest.param(
            [LM, "--mesh", "data:3", "--layout", "batch:data"],
            "dimension 'batch' has size 16, which is not divisible by the",
            id="indivisible size",
        ),
        pytest.param(
            [*ON, "--layout", "batch:model;heads:model"],
            ", but an axis can split only one dimension of an operation",
            id="one axis twice",
        ),
        pytest.param(
            [*ON, "--layout", "batch"],
            "'batch' is not a rule DIM:AXIS or DIM:AXIS+AXIS",
            id="malformed layout",
        ),
        pytest.param(
            [LM, "--mesh", "data"],
            "is not an axis NAME:SIZE; write e.g. 'data:8;model:4'",
            id="malformed mesh",
        ),
        pytest.param([LM, "--mesh", "data:0"], "size must be a positive integer, found 0", id="empty axis"),
        pytest.param([LM, "--mesh", ""], "--mesh is empty; give its axes", id="empty mesh"),
        pytest.param([LM], "--mesh is missing; write the axes and their sizes", id="no mesh"),
        pytest.param(
            [*ON, "--hardware", "tpu-v55"],
            "hardware 'tpu-v55' is not known; did you mean 'tpu-v5",
            id="hardware",
        ),
        pytest.param(
            [*ON, "--hardware", "a100", "--set-hardware", "node_egres=100GB/s"],
            "a100 has no number 'node_egres'; did you mean 'node_egress'?",
            id="a number of the hardware",
        ),
        pytest.param(
            [*ON, "--hardware", "mine.json"], "hardware file 'mine.json' does not exist", id="hardware file"
        ),
        pytest.param(
            [*ON, "--set", "layer=3"],
            f"--set layer=3: {LM} has no hyperparameter 'layer'; did you mean 'layers'? known: activation,",
            id="unknown hyperparameter",
        ),
        pytest.param(
            [*ON, "--set", "layers=many"], "'many' is not a whole number", id="hyperparameter's type"
        ),
        pytest.param(
            [*ON, "--set", "kv_heads=3"], "heads=8 must be a multiple of kv_heads=3", id="model refuses"
        ),
        pytest.param([*ON, "--memory", "16Gigs"], "'Gigs' is not a unit of memory; ", id="memory"),
        pytest.param(["examples/mpl.py", "--mesh", "a:2"], "did you mean 'mlp.py'?", id="no such file"),
        pytest.param(
            [*ON, "--layout", "no_plan.json"], "plan 'no_plan.json' cannot be read", id="no such plan"
        ),
        pytest.param([], "Missing argument 'MODEL'; see layoutopt cost --help", id="no model"),
        pytest.param([*ON, "--lay", "x"], "No such option: --lay", id="unknown option"),
    ],
)
def test_cost_says_what_is_wrong(refused: Callable[..., str], args: list[str], message: str) -> None:
    assert message in refused("cost", *args)


def test_model_files_that_fail(refused: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    for text, message in (
        (
            "def model():\n    return 1 / 0\n",
            f"{file}: model(), line 2 raised ZeroDivisionError: division by zero",
        ),
        ("x = 1\n", f"{file} has no function 'model' to build a model; known: none"),
        (
            "def model():\n    return None\n",
            f"{file}: model() returned nothing; return a mesh_tf_core.Model",
        ),
    ):
        file.write_text(text, encoding="utf-8")
        assert message in refused("cost", str(file), "--mesh", "data:2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has "),
        (json.dumps({"format": "layoutopt-hardware/1", "name": "mine"}), "chip is missing"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_malformed_profile(refused: Callable[..., str], tmp_path: Path, content: str, message: str) -> None:
    profile = tmp_path / "mine.json"
    profile.write_text(content, encoding="utf-8")
    line = refused("cost", *ON, "--hardware", str(profile))
    assert f"hardware file {str(profile)!r}" in line
    assert message in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "layoutopt-plan/1", "mod', "is not valid JSON"),
        (
            '{"format": "layoutopt-plan/9"}',
            "has format 'layoutopt-plan/9', but this version of layoutopt reads 'layoutopt-plan/1'",
        ),
        ("[]", "is not a plan: it must be a JSON object, but is list"),
        ('{"format": "layoutopt-plan/1"}', "'model' is missing, so the file"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_malformed_plan(refused: Callable[..., str], tmp_path: Path, content: str, message: str) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(content, encoding="utf-8")
    assert message in refused("cost", LM, "--layout", str(plan))


def test_commands_that_are_none(refused: Callable[..., str]) -> None:
    assert refused("cots") == "No such command 'cots'; did you mean 'cost'? see layoutopt --help"
    assert "No such option: --vrsion" in refused("--vrsion")
    assert "--time; did you mean --time-limit? see" in refused("search", "examples/mlp.py", "--time", "3")


def test_hardware_of_no_such_name(refused: Callable[..., str]) -> None:
    assert "did you mean 'tpu-v2'? known: a100" in refused("hardware", "tpu-v22")
    assert "did you mean 'h100'? known: a100" in refused("hardware", "H100")
    assert "did you mean 'h100'? known: a100" in refused("hardware", "H100x")


def test_forms_of_a_program(refused: Callable[..., str]) -> None:
    assert "'program', 'stablehlo'" in refused(
        "lower", "examples/mlp.py", "--mesh", "data:4", "--emit", "hlo"
    )


def test_a_full_disk_is_one_line(run: Callable[..., Result]) -> None:
    done = run("search", "examples/mlp.py", "--mesh", "data:2", "--out", "/dev/full")
    assert done.exit_code == 2
    line = "error: the plan '/dev/full' cannot be written: No space left on device; free some space, or"
    assert done.stderr.splitlines()[-1] == f"{line} choose another path"
    assert "the answer" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ["solve-problem", "pipe"],
        ["explain", "pipe"],
        ["report", "pipe"],
        ["size", "examples/mlp.py", "--budget", "1e20", "--fit", "pipe"],
        ["search", "pipe", "--mesh", "data:2"],
        ["cost", "examples/mlp.py", "--mesh", "data:2", "--hardware", "pipe"],
        ["search", "examples/mlp.py", "--mesh", "data:2", "--out", "pipe"],
        ["export", "plan.json", "--to", "jax", "--out", "pipe"],
    ],
    ids=" ".join,
)
def test_a_named_pipe_is_refused_at_once(
    command: list[str], refused: Callable[..., str], tmp_path: Path
) -> None:
    """Nobody may ever come to its other end."""
    at = {"pipe": tmp_path / "pipe.json", "plan.json": tmp_path / "plan.json"}
    os.mkfifo(at["pipe"])
    at["plan.json"].write_text(json.dumps(sample.plain_plan()), encoding="utf-8")

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    try:
        line = refused(*(str(at.get(word, word)) for word in command))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "it is a named pipe" in line or "does not exist" in line


@pytest.mark.parametrize("out", ["", "a\tb", "a\x1b[2Jb", "a\nb"])
def test_names_that_nobody_means(refused: Callable[..., str], out: str) -> None:
    wanted = (
        f"{out!r} has control characters; choose another name" if out else "the path is empty; write a path"
    )
    for command in (["search", *ON, "--out", out], ["export", "plan.json", "--to", "jax", "--out", out]):
        assert refused(*command).startswith(f"--out: {wanted}")


def test_a_hyperparameter_is_not_taken_for_an_option_that_sounds_like_it(refused: Callable[..., str]) -> None:
    for word, said in (("--dtype", "dtype"), ("--batch", "batch"), ("--d-model", "d_model")):
        wanted = f"No such option: {word}; to set a hyperparameter, write --set {said}=64; "
        assert refused("search", *ON, word, "64").startswith(wanted)
    assert "No such option: --devics; did you mean --devices? see" in refused("search", *ON, "--devics", "8")


def test_an_option_of_other_commands(refused: Callable[..., str]) -> None:
    line = refused("lower", *ON, "--hardware", "tpu-v3")
    assert line.startswith("No such option: --hardware; this is an option of search, cost, lint and ")


def test_a_plan_in_the_place_of_a_model(refused: Callable[..., str]) -> None:
    for command in ("train", "cost", "search"):
        line = refused(command, "plan.json", "--mesh", "data:2")
        assert "to use a plan, pass it with --layout, e.g. layoutopt train MODEL --layout PLAN.json" in line


def test_a_graph_that_nobody_can_build(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_tf_core.tracing.graph.MOST_OPERATIONS", 100)
    line = refused("search", "examples/mlp.py", "--mesh", "data:2", "--set", "layers=40")
    assert line.startswith("examples/mlp.py: model(layers=40), line ")
    assert "graph 'mlp' has more than 100 operations; use fewer operations," in line


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ("search MODEL --mesh data:2", "--out MODEL"),
        ("search MODEL:model --mesh data:2", "--report MODEL"),
        ("search MODEL --mesh data:2 --out PLAN", "--report PLAN"),
        ("size MODEL --tokens 1e9 --devices 2", "--out MODEL"),
        ("size MODEL --tokens 1e9 --devices 2", "--report MODEL"),
        ("validate MODEL --mesh data:2", "--out MODEL"),
        ("verify MODEL --mesh data:2 --topology v5e:2x2", "--text MODEL"),
        ("explain PLAN --model MODEL", "--out MODEL"),
        ("report PLAN", "--out PLAN"),
        ("export PLAN --to jax", "--out PLAN"),
    ],
)
def test_no_output_overwrites_what_is_read(
    refused: Callable[..., str], tmp_path: Path, args: str, option: str
) -> None:
    """Not by another name of the same file either."""
    made = {"MODEL": tmp_path / "model.py", "PLAN": tmp_path / "plan.json"}
    made["MODEL"].write_text("from examples.mlp import model\n", encoding="utf-8")
    made["PLAN"].write_text(json.dumps(sample.plain_plan()), encoding="utf-8")
    before = {name: file.read_bytes() for name, file in made.items()}
    words = f"{args} {option}"
    for name, file in made.items():
        words = words.replace(name, str(file))
    *front, last = words.split()
    named = Path(last).parent / "." / Path(last).name
    error = refused(*front, str(named.parent / ".." / named.parent.name / named.name))
    assert f"{option.split()[0]} " in error and "would overwrite a file that this command reads" in error
    assert {name: file.read_bytes() for name, file in made.items()} == before
