"""Arguments of the public functions: fields of a few dataclasses, which are taken as keywords too, and how
refusals name them.

The search's own refusals name options, which the command line shows (`--max-axes 9`, `--elsewhere length`);
those that Python gets name keywords (`max_axes=9`, `elsewhere length`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, ParamSpec, TypeVar

from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from mesh_tf_core.errors import UserError, known_names


def gathered(call: str, asked: Mapping[str, Any], *groups: tuple[Any, Any]) -> list[Any]:
    """Gathers keywords into dataclasses.

    Args:
      call: the function's name.
      asked: keywords: fields of the groups, which override those of the groups.
      groups: each a dataclass, and its given value; None: its defaults.

    Raises:
      UserError: an unknown keyword, or something else than such a dataclass.
    """
    found: list[Any] = []
    names = {kind: names_of(kind) for kind, _ in groups}
    every = [name for own in names.values() for name in own]
    for name in asked:
        if name not in every:
            raise UserError(f"{call}: no argument {name!r}; {known_names(name, every)}")
    for kind, given in groups:
        if not isinstance(given, kind | None):
            raise UserError(f"{call}: {given!r} is not a {kind.__name__}; pass {kind.__name__}(...)")
        own = {name: value for name, value in asked.items() if name in names[kind]}
        base = kind() if given is None else given
        own |= {"given": base.given | own.keys()} if "given" in names[kind] and "given" not in own else {}
        found.append(replace(base, **own))
    return found


def names_of(kind: Any) -> list[str]:
    """The fields that a caller may set."""
    return (
        [*ARGUMENTS, "allow", "given", "restriction"]
        if issubclass(kind, SearchSpace)
        else [f.name for f in fields(kind)]
    )


P = ParamSpec("P")
T = TypeVar("T")
_OPTION = re.compile(
    r"`[^`]*`|(?<![\w-])--(?P<name>[a-z]+(?:-[a-z]+)*)(?P<value> (?=['\d]|-\d|everything|[A-Z]+\b))?"
)
"""An option, alone or with a number, a text or a placeholder as its value; or a command, which is typed as
it is."""
_OTHERWISE = {
    **{option.parameter: name for name, a in ARGUMENTS.items() for option in a.options},
    "fit": "runs",
    "set": "hyperparameter",
}
"""Parameters of options whose keywords may have other names."""


def in_keywords(text: str) -> str:
    """A refusal's text with keywords for options."""
    return _OPTION.sub(_keyword, text)


def _keyword(found: re.Match[str]) -> str:
    option = found["name"]
    if option is None:
        return found[0]
    name = option.replace("-", "_")
    return _OTHERWISE.get(name, name) + ("=" if found["value"] else "")


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
