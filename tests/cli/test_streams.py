"""Real processes: streams, exit codes, colour, pipes, and what each command loads."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from layoutopt.cli import app
from layoutopt.cli.application import CommandGroup
from layoutopt.cli.panels import into_panels

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).parent / "layoutopt")
Process = Callable[..., subprocess.CompletedProcess[str]]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]

LIGHT = (
    ["hardware"],
    ["cost", "examples/mlp.py", "--mesh", "data:2"],
    ["lower", "examples/mlp.py", "--mesh", "data:2"],
)


def test_json_is_all_there_is_on_stdout(process: Process) -> None:
    done = process("cost", "examples/mlp.py", "--mesh", "data:2", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["model"]["name"] == "mlp"
    assert done.stderr == ""


def test_an_error_is_one_line_and_no_traceback(process: Process) -> None:
    done = process("cost", "examples/mlp.py", "--mesh", "data:2", "--layout", "batch:dta")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*no axis 'dta'; did you mean 'data'\? known: data\n", done.stderr)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("args", "code"), [(["cost", "none.py"], 2), (["cost", "--no-such-option"], 2)])
def test_with_json_an_error_is_an_object(process: Process, args: list[str], code: int) -> None:
    done = process(*args, "--json")
    assert (done.returncode, done.stdout) == (code, "")
    told = json.loads(done.stderr)
    assert list(told) == ["error", "exit"] and told["exit"] == code and told["error"]


def test_a_reader_that_leaves_is_no_error() -> None:
    line = f"{shlex.quote(COMMAND)} hardware h100 | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("variable", [{}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_no_colour_in_pipes_or_where_it_is_not_wanted(
    process: Process, variable: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    assert not re.search(r"\x1b\[[\d;]*3\dm", process("hardware", "tpu-v2").stdout)


@pytest.mark.nightly
def test_works_from_another_folder(process: Process, tmp_path: Path) -> None:
    assert process("init", cwd=tmp_path).stdout == "model.py\n"
    done = process("cost", "model.py", "--mesh", "data:2", "--layout", "batch:data", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["model"]["name"] == "two_layers"
    example = str(ROOT / "examples/transformer_lm.py")
    assert process("cost", example, "--mesh", "data:2", "--json", cwd=tmp_path).returncode == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("args", LIGHT, ids=lambda a: a[0])
def test_commands_load_only_what_they_need(args: list[str]) -> None:
    code = (
        "import sys\nfrom layoutopt.cli import app\nsys.argv[0] = 'layoutopt'\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(sorted({n.split('.')[0] for n in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert not {"'tensorflow'", "'ortools'", "'matplotlib'", "'pandas'", "'scipy'"} & set(
        re.findall(r"'\w+'", done.stderr)
    )


def test_help_waits_for_no_numeric_library() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", COMMAND, "--help"], capture_output=True, text=True, check=True
    )
    loaded = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "rich" in loaded
    assert not {"typer", "numpy", "pydantic", "mesh_tf_core", "costmodels"} & loaded


def test_help_lists_every_command_once(process: Process) -> None:
    shown = process("--help").stdout
    assert shown == process().stdout
    for name in COMMANDS:
        assert len(re.findall(rf"^│ {name} ", shown, re.MULTILINE)) == 1


def test_help_says_what_typer_would_say_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    group: Any = typer.main.get_command(app)
    into_panels(group)
    with group.make_context("layoutopt", [], resilient_parsing=True) as context:
        group.get_help_option(context).rich_help_panel = None  # the list of commands has no panels
        said = []
        for show in (group.format_help, super(CommandGroup, group).format_help):
            show(context, context.make_formatter())
            said.append(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert said[0] == said[1] and "solve-problem" in said[0]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_examples_that_parse(name: str) -> None:
    """What several processes run is an example of `launch`."""
    command: Any = COMMANDS[name]
    examples = [line for line in command.epilog.splitlines() if line.startswith("layoutopt ")]
    assert examples
    for example in examples:
        program, called, *args = shlex.split(example.split(" | ")[0])
        assert program == "layoutopt" and (called == name or (called == "launch" and name in args))
        COMMANDS[called].make_context(called, args)
    assert command.help and all(p.help for p in command.params)


@pytest.mark.nightly
def test_a_reader_that_leaves_does_not_take_the_plan_along(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    search = f"{shlex.quote(COMMAND)} search examples/mlp.py --mesh data:2 --microbatches 1 -q"
    line = f"{search} --out {shlex.quote(str(out))} | head -n 1"
    subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(out.read_text(encoding="utf-8"))["format"] == "layoutopt-plan/1"
