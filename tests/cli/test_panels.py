"""The help of commands: four panels, and ten lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import typer
from typer.testing import Result

from layoutopt.cli import app
from layoutopt.cli.listing import COMMANDS, PURPOSE
from layoutopt.cli.panels import CHOICES, MOST_USED, OUTPUT, PANELS, RULES, TARGET, WIDE
from layoutopt.space.decisions import ARGUMENTS, BY_HAND

EVERY = [name for listed in COMMANDS.values() for name in listed]
GROUP = typer.main.get_command(app)


@pytest.mark.parametrize("name", EVERY)
def test_the_short_help_is_ten_lines(run: Callable[..., Result], name: str) -> None:
    done = run(name, "-h")
    lines = done.stdout.strip().split("\n")
    assert done.exit_code == 0 and 4 <= len(lines) <= 10
    assert lines[0].startswith(f"layoutopt {name}") and lines[-1] == f"All options: layoutopt {name} --help"
    assert all(len(line) <= WIDE for line in lines if not line.startswith("Example: "))


def test_the_short_help_of_all_names_every_command(run: Callable[..., Result]) -> None:
    lines = run("-h").stdout.strip().split("\n")
    assert len(lines) <= 10 and lines[1] == PURPOSE
    assert all(any(name in line for line in lines) for name in EVERY)


@pytest.mark.parametrize("name", ["search", "cost", "size"])
def test_options_are_in_their_panels(name: str) -> None:
    params = [p for p in GROUP.commands[name].params if p.param_type_name == "option"]  # type: ignore[attr-defined]
    panels = {p.opts[0]: p.rich_help_panel for p in params}
    kinds = {o.name for a in ARGUMENTS.values() for o in a.options} | {o.name for o in BY_HAND} | {"--allow"}
    assert {panels[option] for option in kinds & panels.keys()} <= {CHOICES, RULES}
    assert {TARGET, CHOICES, OUTPUT} <= {*panels.values()}
    if name == "search":
        assert {*panels.values()} == {TARGET, CHOICES, RULES, OUTPUT}


def test_panels_name_parameters_that_there_are() -> None:
    known = {p.name for command in GROUP.commands.values() for p in command.params}  # type: ignore[attr-defined]
    assert {*MOST_USED} <= known and {n for names in PANELS.values() for n in names.split()} <= known | {
        "help"
    }


def test_the_help_of_no_command_waits_for_the_runtime() -> None:
    code = (
        "import sys\nfrom layoutopt.cli.application import _Commands\n[*_Commands().values()]\n"
        "print({'mesh_tf_core', 'pydantic', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", EVERY)
def test_help_follows_the_terminal_and_pads_no_line(
    name: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for words in ([name, "--help"], [name, "-h"]):
        lines = [line for line in run(*words).stdout.splitlines() if not line.startswith("Example: ")]
        assert all(line == line.rstrip() and len(line) <= 60 for line in lines)
