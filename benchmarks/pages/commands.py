"""The reference of commands, out of what `layoutopt COMMAND --help` is made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import EnumType
from typing import Any

import typer

from benchmarks.pages.tables import table
from layoutopt.cli import app

COMMON = 3
"""In so many commands an option stands in the table of those that several share."""
HEAD = """\
# Commands

`python -m benchmarks.pages` writes this page from the help of the commands. `layoutopt COMMAND --help`
prints the same text. Results go to stdout, progress and messages to stderr. `--json`, where a command has
it, prints one JSON object and nothing else on stdout.

| exit code | meaning |
|---|---|
| 0 | done |
| 2 | the input is wrong: one line on stderr says what to change |
| 3 | no layout fits: proven, with the reason and repairs |
| 4 | a limit ended the command before it found anything |
| 5 | a process of a job was lost |
| 130, 143, 129 | ended by Ctrl-C, SIGTERM, SIGHUP, after saving |
"""


def page() -> Iterator[str]:
    """docs/reference/commands.md."""
    yield HEAD
    group: Any = typer.main.get_command(app)
    commands = {name: each for name, each in group.commands.items() if not each.hidden}
    yield from table(("command", "does"), ((f"[{n}](#{n})", _first(c)) for n, c in commands.items()))
    counts = Counter(row for each in commands.values() for row in _rows(each))
    common = sorted(row for row, count in counts.items() if count >= COMMON)
    for name, command in commands.items():
        yield from _command(name, command, common)
    yield "## Options of several commands\n"
    yield from table(("option", "meaning", "default"), common)


def _first(command: Any) -> str:
    return _plain(str(command.help or "").split("\n\n")[0])


def _plain(text: str) -> str:
    """A help text as the text of a cell."""
    text = re.sub(r"\[/?[a-z][a-z ]*\]", "", text.replace("\b", "")).replace("\\[", "[")
    return " ".join(text.split()).replace("|", "\\|")


def _rows(command: Any) -> list[tuple[str, str, str]]:
    """Arguments and options of a command: how they are typed, what they mean, their default."""
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    return [
        (
            f"`{_metavar(p) if p.param_type_name == 'argument' else _option(p)}`",
            _plain(p.help or ""),
            _default(p),
        )
        for p in shown
    ]


def _command(name: str, command: Any, common: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    typed = " ".join(_metavar(p) for p in command.params if p.param_type_name == "argument")
    yield f"## {name}\n\n`layoutopt {name} [OPTIONS]{' ' * bool(typed)}{typed}`\n"
    yield f"{_first(command)}\n"
    rows = _rows(command)
    if own := [row for row in rows if row not in common]:
        yield from table(("option", "meaning", "default"), own)
    if shared := [row[0] for row in rows if row in common]:
        yield f"[Also](#options-of-several-commands): {', '.join(shared)}.\n"
    examples = re.findall(r"^\s*(layoutopt .*)$", str(command.epilog or ""), re.MULTILINE)
    if examples:
        yield "```\n" + "\n".join(" ".join(e.split()) for e in examples) + "\n```\n"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _option(parameter: Any) -> str:
    names = ", ".join(parameter.opts)
    if parameter.is_flag:
        return names
    kind = parameter.type_descriptor.annotation
    choices = [str(c.value) for c in kind] if isinstance(kind, EnumType) else []
    typed = "/".join(choices) or parameter.metavar or getattr(kind, "__name__", "VALUE").upper()
    typed = typed[1:-1] if typed.startswith("[") and typed.endswith("]") else typed
    return f"{names} {typed.replace('|', '/')}"


def _default(parameter: Any) -> str:
    given, value = parameter.show_default, parameter.default
    if isinstance(given, str):
        return given
    if not given or value is None or callable(value) or isinstance(value, bool):
        return ""
    return f"`{getattr(value, 'value', value)}`"
