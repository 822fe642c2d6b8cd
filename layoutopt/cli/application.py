"""The command line as a typer application; commands are imported on use."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from layoutopt.cli.defaults import Command, add_sources
from layoutopt.cli.exits import fail, handled
from layoutopt.cli.hints import usage
from layoutopt.cli.listing import COMMANDS, PLANNING, PURPOSE, VERSION, short_listing, show_help
from layoutopt.cli.panels import asks_short, into_panels, short_help
from layoutopt.runtime import signals

CTRL_C = 130  # 128 + SIGINT


class CommandGroup(TyperGroup):
    """The commands, and where their errors turn into exit codes."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        given: Sequence[str] | None = args[0] if args else kwargs.get("args")
        words = sys.argv[1:] if given is None else given
        if asks_short(words) and (len(words) == 1 or words[0] in self.commands):
            name = words[0] if len(words) == 2 else ""
            print(short_help(self.commands[name], f"layoutopt {name}") if name else short_listing())
            sys.exit(0)
        if words and words[0] in self.commands:
            from mesh_tf_core.engines.jax import compat

            # A model file may start JAX: to plan takes no accelerator from a job.
            if words[0] in PLANNING or not compat.accelerated():
                compat.stay_on_cpu()
        as_json = "--json" in words
        # But for `train`, which hears all, a worker of several has nothing to save by itself.
        several = any(word.partition("=")[0] in ("--cluster", "--coordinator") for word in words)
        numbers = (signal.SIGINT,) if several else signals.ENDING
        with handled(words):
            try:
                with signals.command(numbers):
                    code = super().main(*args, **kwargs)
                sys.stdout.flush()
            except typer.TyperException as error:
                fail(usage(error, words), error.exit_code, as_json)
            except typer.Abort:
                fail("stopped", signals.exit_code(), as_json)
        # Typer knows one code for KeyboardInterrupt, whichever signal raised it.
        sys.exit(signals.exit_code() if code == CTRL_C else code if isinstance(code, int) else 0)

    def format_help(self, *_: Any) -> None:
        show_help()

    def list_commands(self, *_: Any) -> list[str]:
        return [*self.commands]


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
