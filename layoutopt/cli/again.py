"""The command line that was typed, with some options otherwise: to be copied."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import typer

LEFT_OUT = {"as_json", "quiet", "report"}
"""Parameters that are about how a result is shown."""


Changed = str | Sequence[str] | None
"""The changed value of an option: a value, several, or None where it is left out."""


def command_line(context: typer.Context, changed: Mapping[str, Changed]) -> str:
    """The command that runs in `context`, ready for a shell.

    Args:
      changed: option -> its new value.
    """
    found, left = ["layoutopt", context.info_name or ""], dict(changed)
    for param in context.command.params:
        name, option = str(param.name), param.opts[0]
        if name in LEFT_OUT:
            continue
        if option in left:
            found += _words(option, left.pop(option))
            continue
        found += _typed(param, context.params.get(name))
    return shlex.join([*found, *(word for option, value in left.items() for word in _words(option, value))])


def _words(option: str, value: Changed) -> list[str]:
    values = () if value is None else (value,) if isinstance(value, str) else value
    return [word for each in values for word in (option, each)]


def _typed(param: Any, value: Any) -> Iterator[str]:
    """The words that give a parameter this value; none where it is the default's."""
    if value is None or value == () or value == [] or value == param.default:
        return
    if param.param_type_name == "argument":
        yield from map(_word, value if isinstance(value, list | tuple) else [value])
    elif value is True:
        yield param.opts[0]
    elif value is not False:
        many: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
        for each in many:
            yield from (param.opts[0], _word(each))


def _word(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)
