"""The reference of commands, out of what `layoutopt COMMAND --help` is made of."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import EnumType
from typing import Any

import typer

from benchmarks.pages.tables import table
from layoutopt.cli import app
from layoutopt.space.decisions import ALLOW, ARGUMENTS, BY_HAND, FEATURES

SHARED = 3
"""So many options that the same commands take have a table of their own."""
TOPICS = {
    "search": "Options of a search",
    "cost": "Options of a layout",
    "train": "Options of processes",
}
"""First command of those that share a table -> its title."""
HEADS, Row = ("option", "meaning", "default"), tuple[str, str, str]
HEAD = """\
# Commands

`layoutopt COMMAND --help` prints the same text. Results go to stdout, progress and messages to stderr.

| exit code | meaning |
|---|---|
| 0 | done |
| 2 | the input is wrong: one line on stderr says what to change |
| 3 | no layout fits: proven, with the reason and repairs |
| 4 | a limit ended the command before it found anything |
| 5 | a process of a job was lost |
| 6 | a bound of `check` is broken |
| 130, 143, 129 | ended by Ctrl-C, SIGTERM, SIGHUP, after saving |
"""


def page() -> Iterator[str]:
    """docs/reference/commands.md."""
    yield HEAD
    group: Any = typer.main.get_command(app)
    commands = {name: each for name, each in group.commands.items() if not each.hidden}
    yield f"Commands: {', '.join(f'[{name}](#{name})' for name in commands)}.\n"
    groups = _groups(commands)
    for name, command in commands.items():
        yield from _command(name, command, groups)
    for title, rows in groups.items():
        yield f"## {title}\n"
        yield from table(HEADS, rows)


def options() -> Iterator[str]:
    """layoutopt/space/options.json: options of all kinds of decisions, for help and completion."""
    asked = [ALLOW, *ARGUMENTS.values()]
    found = {
        "asked": [asdict(o) for a in asked for o in a.options],
        "axes": [o.name for a in asked if a.names_axes for o in a.options],
        "by_hand": [asdict(o) for o in BY_HAND],
        "features": [*FEATURES],
    }
    yield json.dumps(found, indent=1, ensure_ascii=False)


def _groups(commands: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Title -> options that several commands share; those of the same commands stand together."""
    users: dict[Row, list[str]] = defaultdict(list)
    for name, command in commands.items():
        for row in _rows(command):
            users[row].append(name)
    together: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row, names in users.items():
        if len(names) > 1:
            together[tuple(names)].append(row)
    large = {names: rows for names, rows in together.items() if len(rows) >= SHARED}
    rest: dict[str, Row] = {}
    for names, rows in together.items():
        for row in rows if names not in large else ():
            rest.setdefault(_typed(row), row)
    titles = {names: TOPICS.get(names[0], f"Options of {' and '.join(names)}") for names in large}
    return {
        **{titles[names]: rows for names, rows in large.items()},
        "Options of several commands": [*rest.values()],
    }


def _typed(row: Row) -> str:
    """The name of an option, as one types it."""
    return row[0].strip("`").split()[0].strip(",")


def _first(command: Any) -> str:
    return _plain(str(command.help or "").split("\n\n")[0])


def _plain(text: str) -> str:
    """A help text as the text of a cell."""
    text = re.sub(r"\[/?[a-z][a-z ]*\]", "", text.replace("\b", "")).replace("\\[", "[")
    return " ".join(text.split()).replace("|", "\\|")


def _rows(command: Any) -> list[Row]:
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


def _command(name: str, command: Any, groups: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    typed = " ".join(_metavar(p) for p in command.params if p.param_type_name == "argument")
    yield f"## {name}\n\n`layoutopt {name} [OPTIONS]{' ' * bool(typed)}{typed}`\n"
    yield f"{_first(command)}\n"
    rows, shared = _rows(command), {row for group in groups.values() for row in group}
    if own := [row for row in rows if row not in shared]:
        yield from table(HEADS, own)
    *whole, rest = groups.items()
    also = [
        f"the [{title[0].lower()}{title[1:]}](#{_anchor(title)})"
        for title, group in whole
        if group[0] in rows
    ]
    also += [f"`{_typed(row)}`" for row in rest[1] if row in rows]
    if also:
        yield f"Also: {', '.join(also)}.\n"
    examples = re.findall(r"^\s*(layoutopt .*)$", str(command.epilog or ""), re.MULTILINE)
    if examples:
        yield "```\n" + "\n".join(" ".join(e.split()) for e in examples) + "\n```\n"


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


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
