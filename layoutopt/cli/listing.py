"""The commands, by what they are for, and the help that lists them.

`layoutopt --help` reads this module alone: a command is imported when it is called. What is said of a command
here is the first paragraph of its docstring; tests hold the help to what typer makes of the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO

COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Find a layout": {
        "search": "Find the best layout of a model, prove it, and show it with its alternatives.",
        "explain": "Say why a plan's layout and not another: what each split is worth, what binds, what a "
        "pin costs.",
        "cost": "Price a layout: per operation, per axis, per phase, and its peak memory.",
        "lint": "Find likely mistakes of a layout, or of your own shardings, and what they cost.",
        "size": "Which size to train, on which chips, on how many, for how long: scaling laws over proven "
        "layouts.",
    },
    "Run it": {
        "train": "Train a model on this machine's mesh, under the best layout or one of yours.",
        "launch": "Start local workers that run one command together; training starts again if one fails.",
        "generate": "Continue texts with a trained model, under any layout.",
        "calibrate": "Measure this machine or several processes, or compile for a TPU; fit the profile for "
        "predictions.",
        "validate": "Run many layouts on this machine and hold the predicted times against the measured "
        "ones.",
        "measure": "Run a layout's step on this machine and time it; count what the devices send.",
        "verify": "Compile with the real TPU compiler: collectives, peak memory and compute time against "
        "ours.",
    },
    "Show it": {
        "lower": "Print the SPMD program: what each device computes, sends and keeps.",
        "report": "Write a report that opens in any browser: which layout, how fast, does it fit, how sure.",
        "export": "Write a plan's layout in the form that another library takes, and say what it lacks; or "
        "its step.",
    },
    "More": {
        "init": "Write a commented model.py to start from, or an example.",
        "hardware": "List the machines to price for, or show one with the source of each number.",
        "solve-problem": "Solve a problem in the general form, or in the contest's.",
    },
}
"""Purpose -> command's name -> its one-line description."""
PLANNING = (*COMMANDS["Find a layout"], *COMMANDS["Show it"])
"""The commands that run nothing on devices."""
PURPOSE = "Find, prove, explain and apply the best layout of a model over a mesh of devices."
VERSION = "Print the version."
OPTIONS = {
    "--version": VERSION,
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell, to copy it or customize the installation.",
    "--help": "Show this message and exit.",
}


def short_listing() -> str:
    """The list of commands, in ten lines."""
    width = max(map(len, COMMANDS))
    rows = [f"  {title:{width}}  {', '.join(listed)}" for title, listed in COMMANDS.items()]
    lines = ["layoutopt COMMAND [OPTIONS]", PURPOSE, *rows]
    more = "Most used options of a command: layoutopt COMMAND -h", "All commands: layoutopt --help"
    return "\n".join([*lines, *more])


@contextmanager
def unpadded() -> Iterator[None]:
    """Lines that are printed within end without spaces, where no terminal shows them."""
    if sys.stdout.isatty():
        yield
        return
    with redirect_stdout(StringIO()) as found:
        yield
    print("\n".join(line.rstrip() for line in found.getvalue().splitlines()))


@unpadded()
def show_help() -> None:
    """Prints the commands and the options that come before one."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    usage = Text.assemble(("Usage: ", "yellow"), "layoutopt [OPTIONS] COMMAND [ARGS]...")
    console.print(Padding(usage, 1), style="bold")
    console.print(Padding(PURPOSE, (0, 1, 1, 1)))
    width = max(len(name) for listed in COMMANDS.values() for name in listed)
    panels: dict[str, list[list[str | Text]]] = {"Options": [[name, said] for name, said in OPTIONS.items()]}
    panels |= {title: [[name, said] for name, said in listed.items()] for title, listed in COMMANDS.items()}
    for title, rows in panels.items():
        table = Table(box=None, show_header=False, pad_edge=False, expand=True)
        if title == "Options":
            table.add_column(style="bold cyan")
            table.add_column()
        else:
            table.add_column(style="bold cyan", no_wrap=True, width=width)
            table.add_column(ratio=10)
        for row in rows:
            table.add_row(*row)
        console.print(Panel(table, border_style="dim", title=title, title_align="left"))
