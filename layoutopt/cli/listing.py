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
        "search": (
            "Find the best layout of a model, prove that it is optimal, and show it with its alternatives."
        ),
        "explain": "Explain a plan: what each split saves, which limit binds, and what a pin costs.",
        "cost": "Predict a layout's step time by operation, axis and phase, and its peak memory.",
        "lint": "Find likely mistakes in a layout, or in your own shardings, and predict their cost.",
        "candidates": "List the layouts worth measuring, and which of them predictions cannot tell apart.",
        "learn": "Fit a framework's constants to runs that you measured.",
        "check": "Check bounds on a plan's or layout's step time and memory; exit code 6 if one is broken.",
        "size": "Choose a model size, chips and training time by scaling laws and searched layouts.",
    },
    "Run it": {
        "train": "Train a model on this machine, under the best layout or your own.",
        "launch": "Start local workers that run one command together, and restart training if one fails.",
        "generate": "Continue prompts with a trained model, under any layout.",
        "calibrate": "Fit a hardware profile to measurements of this machine, or to the TPU compiler's "
        "estimates.",
        "validate": "Measure several layouts on this machine and compare them with their predictions.",
        "measure": "Time a layout's step on this machine and count the bytes that devices send.",
        "verify": "Compile with the TPU compiler and compare collectives, memory and compute time with "
        "the prediction.",
    },
    "Show it": {
        "lower": "Print the SPMD program that each device runs.",
        "report": "Write a report for any browser: the layout, its time and memory, and the evidence.",
        "export": "Write a plan's layout for another library, or its predicted step as a trace.",
    },
    "More": {
        "init": "Write a commented model.py to start from, or an example.",
        "hardware": "List the hardware presets, or show one with the source of each number.",
        "frameworks": "List the training software that can be predicted, or show one with its sources.",
        "solve-problem": "Solve a problem in layoutopt's format, or in that of the ASPLOS 2025 contest.",
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
