"""How refusals name what was asked for.

The search's own name options, which the command line shows (`--max-axes 9`, `--elsewhere length`); those that
Python gets name keywords (`max_axes=9`, `elsewhere length`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mesh_tf_core.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")
_OPTION = re.compile(r"`[^`]*`|(?<![\w-])--(?P<name>[a-z]+(?:-[a-z]+)*)(?P<value> (?=['\d]|-\d))?")
"""An option, alone or with a number or a text as its value; or a command, which is typed as it is."""
_OTHERWISE = {"pin": "pins", "fit": "runs", "set": "hyperparameter"}
"""Options whose keywords have other names."""


def in_keywords(text: str) -> str:
    """A refusal's text with keywords for options."""
    return _OPTION.sub(_keyword, text)


def _keyword(found: re.Match[str]) -> str:
    option = found["name"]
    if option is None:
        return found[0]
    return _OTHERWISE.get(option, option.replace("-", "_")) + ("=" if found["value"] else "")


def from_python(call: Callable[P, T]) -> Callable[P, T]:
    """A function whose refusals name keywords."""

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except UserError as error:
            error.args = (in_keywords(str(error)),)
            raise

    return called
