"""The command line, `layoutopt`: one module per command. Each imports what it needs when it is called."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from layoutopt.cli import (
    calibrate,
    cost,
    explain,
    export,
    generate,
    hardware,
    init,
    launch,
    lint,
    lower,
    measure,
    report,
    search,
    size,
    solve_problem,
    train,
    validate,
    verify,
)
from layoutopt.cli.group import Group
from layoutopt.cli.streams import open_streams

FIND, RUN, SHARE, MORE = "Find a layout", "Run it", "Show it", "More"

app = typer.Typer(cls=Group, pretty_exceptions_enable=False)


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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find, prove, explain and apply the best layout of a model over a mesh of devices."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command(epilog=search.EXAMPLES, rich_help_panel=FIND)(search.search)
app.command(epilog=explain.EXAMPLES, rich_help_panel=FIND)(explain.explain)
app.command(epilog=cost.EXAMPLES, rich_help_panel=FIND)(cost.cost)
app.command(epilog=lint.EXAMPLES, rich_help_panel=FIND)(lint.lint)
app.command(epilog=size.EXAMPLES, rich_help_panel=FIND)(size.size)
app.command(epilog=train.EXAMPLES, rich_help_panel=RUN)(train.train)
app.command(epilog=launch.EXAMPLES, rich_help_panel=RUN)(launch.launch)
app.command(epilog=generate.EXAMPLES, rich_help_panel=RUN)(generate.generate)
app.command(epilog=calibrate.EXAMPLES, rich_help_panel=RUN)(calibrate.calibrate)
app.command(epilog=validate.EXAMPLES, rich_help_panel=RUN)(validate.validate)
app.command(epilog=measure.EXAMPLES, rich_help_panel=RUN)(measure.measure)
app.command(epilog=verify.EXAMPLES, rich_help_panel=RUN)(verify.verify)
app.command(epilog=lower.EXAMPLES, rich_help_panel=SHARE)(lower.lower)
app.command(epilog=report.EXAMPLES, rich_help_panel=SHARE)(report.report)
app.command(epilog=export.EXAMPLES, rich_help_panel=SHARE)(export.export)
app.command(epilog=init.EXAMPLES, rich_help_panel=MORE)(init.init)
app.command(epilog=hardware.EXAMPLES, rich_help_panel=MORE)(hardware.hardware)
app.command("solve-problem", epilog=solve_problem.EXAMPLES, rich_help_panel=MORE)(solve_problem.solve_problem)


YOUNG, OLDER = 10_000_000, (50, 1000)
"""Objects, and collections of younger ones, between two walks of the garbage collector: a search makes many
and drops few, and walking them again and again was a fifth of its time. The process is the command's own."""


def main() -> None:
    """Entry point of the console script."""
    gc.set_threshold(YOUNG, *OLDER)
    try:
        with open_streams():
            app(prog_name="layoutopt")
    finally:
        # All that is left goes with the process: nothing to collect from it.
        gc.freeze()
