"""The help of a command: its options in four panels, and `-h`, which says the most used in ten lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import Any

TARGET, CHOICES, RULES, OUTPUT = "Target", "Decisions to search", "Rules", "Output"
PANELS = {
    TARGET: (
        "mesh devices max_axes layout settings hardware set_hardware framework memory model target like"
    ),
    RULES: "objective pin forbid top time_limit accept_loss tokens price max_memory max_step",
    OUTPUT: "out report text lines trace as_json quiet help",
}
"""Panel -> parameters of options, as words; those of kinds of decisions are in `CHOICES`."""
MOST_USED = ("mesh", "devices", "layout", "hardware", "memory", "allow", "steps", "out", "as_json")
"""Parameters that `-h` says, the first few that a command has."""
FEW = 5
WIDE = 100
"""Columns of `-h` at most."""


def into_panels(command: Any) -> None:
    """Puts a command's options into panels; those of kinds of decisions are in theirs.

    Flags and arguments show no type: their names and texts say what they take.
    """
    from typer import Context  # which the list of commands does without

    panels = {name: panel for panel, names in PANELS.items() for name in names.split()}
    for param in command.get_params(Context(command)):
        if param.param_type_name == "argument" or param.is_flag:
            param.display_type_rich = lambda ctx: None
        if param.name in panels and param.param_type_name == "option":
            param.rich_help_panel = panels[param.name]


def short_help(command: Any, path: str) -> str:
    """Ten lines about a command: its purpose, its most used options and an example.

    Args:
      path: the words before its arguments.
    """
    return "\n".join(_lines(command, path))


def _lines(command: Any, path: str) -> Iterator[str]:
    arguments = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
    yield f"{' '.join([path, *arguments])} [OPTIONS]"
    yield _cut((command.help or "").strip().split("\n")[0])
    options = {p.name: p for p in command.params if p.param_type_name == "option"}
    used = [options[name] for name in MOST_USED if name in options][:FEW]
    width = max((len(_typed(p)) for p in used), default=0)
    for param in used:
        yield _cut(f"  {_typed(param):{width}}  {param.help or ''}")
    examples = (line for line in (command.epilog or "").split("\n") if line.startswith("layoutopt "))
    if found := next(examples, ""):
        yield f"Example: {found}"
    yield f"All options: {path} --help"


def _typed(param: Any) -> str:
    return param.opts[0] if param.is_flag else f"{param.opts[0]} {param.metavar or param.name.upper()}"


def _cut(line: str) -> str:
    """A line, cut at a word where the terminal ends."""
    wide = min(WIDE, get_terminal_size((WIDE, 0)).columns)
    return line if len(line) <= wide else f"{line[: wide - 2].rsplit(' ', 1)[0]} …"


def asks_short(words: Sequence[str]) -> bool:
    """True if a command line asks for the short help."""
    return bool(words) and words[-1] == "-h" and len(words) <= 2
