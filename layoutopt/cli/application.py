"""The command line as a typer application; commands are imported on use."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from layoutopt.cli.defaults import Command, add_sources
from layoutopt.cli.group import CommandGroup
from layoutopt.cli.listing import COMMANDS, PURPOSE, VERSION
from layoutopt.cli.panels import into_panels
from layoutopt.runtime import signals

EXAMPLES = Path(__file__).with_name("examples.json")
"""Command -> lines that work, as its help and the reference show them."""


class _Commands(Mapping[str, Any]):
    """Name -> command, of the function of that name in the module of that name; each is made once."""

    def __init__(self) -> None:
        self._panels = {name: panel for panel, listed in COMMANDS.items() for name in listed}
        self._made: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._panels)

    def __len__(self) -> int:
        return len(self._panels)

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            panel, word = self._panels[name], name.replace("-", "_")
            with signals.nothing_to_keep(lambda: None):
                module = importlib.import_module(f"layoutopt.cli.{word}")
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            registered = alone.command(name, cls=Command, epilog=_examples(name), rich_help_panel=panel)
            registered(getattr(module, word))
            made = self._made[name] = typer.main.get_command(alone)
            add_sources(made)
            into_panels(made)
        return self._made[name]


def _examples(name: str) -> str:
    """The end of a command's help: lines that work."""
    lines: list[str] = json.loads(EXAMPLES.read_text(encoding="utf-8")).get(name, [])
    return "\n\n".join(["Examples:" if len(lines) > 1 else "Example:", *lines])


class _Layoutopt(CommandGroup):
    """The group of all commands."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "commands": _Commands()})


app = typer.Typer(cls=_Layoutopt, pretty_exceptions_enable=False, help=PURPOSE)


def _print_version(asked: bool) -> None:
    """Prints the installed version and ends, when `--version` was given."""
    if asked:
        from importlib.metadata import version

        typer.echo(version("layoutopt"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help=VERSION)
    ] = False,
) -> None:
    """Handles the options before a command."""
    if context.invoked_subcommand is None:
        context.get_help()
