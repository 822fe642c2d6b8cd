"""Options that say what a search may choose, made from the arguments of all kinds of decisions: of `search`,
and of `size`, which searches each candidate."""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Annotated, Any

import typer

from layoutopt.space.decisions import ARGUMENTS, SearchSpace
from layoutopt.space.kind import Option

MaxAxesOption = Annotated[
    int, typer.Option("--max-axes", metavar="K", help="With --devices: at most so many axes of a mesh.")
]
BETWEEN = ";"
"""Stands between rules that were given one after the other."""


def parameter(option: Option) -> str:
    """The parameter that an option is read as."""
    return option.name.removeprefix("--").replace("-", "_")


class Allowed:
    """Options by the names of their parameters."""

    def given(self, option: str) -> list[str]:
        """What an option that may be given again says."""
        name = option.removeprefix("--").replace("-", "_")
        return [*(getattr(self, name) or ())]

    def space(self, **more: Any) -> SearchSpace:
        """What a search may choose.

        Args:
          more: fields of `SearchSpace` that have no option here.
        """
        found = dict(more)
        for name, argument in ARGUMENTS.items():
            given = {o.name: getattr(self, parameter(o), None) for o in argument.options}
            said = {n: BETWEEN.join(v) if isinstance(v, list | tuple) else v for n, v in given.items()}
            if name not in more and (text := argument.read(said)) is not None:
                found[name] = text
        return SearchSpace(**found)


def _options(names_axes: bool) -> Any:
    """A group of options (`grouped`): those of arguments that name axes of a mesh, or of the others."""
    made = [
        (
            parameter(option),
            Annotated[
                list[str] | None if option.several else str | None,
                typer.Option(
                    option.name,
                    metavar=option.metavar,
                    help=option.help,
                    show_default=option.usual if option.several else bool(option.usual),
                ),
            ],
            field(default=None if option.several else option.usual or None),
        )
        for argument in ARGUMENTS.values()
        if argument.names_axes <= names_axes
        for option in argument.options
    ]
    return make_dataclass("AllowedOptions", made, bases=(Allowed,), frozen=True)


OnMesh, OnAnyMesh = _options(True), _options(False)
