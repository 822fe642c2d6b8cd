"""Options that several commands share as one parameter: a dataclass whose fields are the options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of each dataclass in the place of the parameter that takes one; so for
    dataclasses in dataclasses."""
    named = [*_options(command)]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**_made(command, given))

    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in named}
    return run


def _options(takes: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(takes, eval_str=True).parameters.values():
        if is_dataclass(parameter.default):
            yield from _options(type(parameter.default))
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _made(takes: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of what takes some options, of all that are given."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(takes).parameters.items():
        group: Any = type(parameter.default)
        found[name] = group(**_made(group, given)) if is_dataclass(parameter.default) else given[name]
    return found
