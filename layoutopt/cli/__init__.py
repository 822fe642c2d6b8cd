"""The command line, `layoutopt`: one module per command, each imported when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _print_version(asked: bool) -> None:
    """Prints the installed version and ends, when `--version` was given."""
    if asked:
        from importlib.metadata import version

        typer.echo(version("layoutopt"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find, prove, explain and apply the best layout of a model over a mesh of devices."""


def main() -> None:
    """Entry point of the console script."""
    app()
