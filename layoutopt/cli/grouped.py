"""Options that several commands share as one parameter: a dataclass whose fields are the options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of each dataclass in the place of the parameter that takes one."""
    named: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = type(parameter.default) if is_dataclass(parameter.default) else None
        options = [parameter]
        if group is not None:
            options = list(inspect.signature(group, eval_str=True).parameters.values())
            groups[parameter.name] = group, [option.name for option in options]
        named += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group(**{option: given.pop(option) for option in options})
            for name, (group, options) in groups.items()
        }
        command(**made, **given)

    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in named}
    return run
