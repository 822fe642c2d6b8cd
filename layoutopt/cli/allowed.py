"""Options of the choices of a search, made from the arguments of all kinds of decisions: for `search`, and
for `size`, which searches each candidate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.panels import CHOICES
from layoutopt.space.option import Option, listed

if TYPE_CHECKING:
    from layoutopt.space.decisions import SearchSpace

MaxAxesOption = Annotated[
    int,
    typer.Option(
        "--max-axes", metavar="K", help="Search only meshes of at most this many axes (with --devices)."
    ),
]
BETWEEN = ","
"""Separator of rules and words that were given one after the other."""


class Allowed:
    """Options by the names of their parameters."""

    def given(self, option: str) -> list[str]:
        """The values of an option that may be given again."""
        name = option.removeprefix("--").replace("-", "_")
        return [*(getattr(self, name) or ())]

    def _given(self, o: Option, typed: typer.Context | None) -> bool:
        """True if an option was typed, or is in a file; without the command line, if it is not the usual."""
        if typed is None:
            return getattr(self, o.parameter, None) not in (None, o.usual)
        source = typed.get_parameter_source(o.parameter)
        return source is not None and source.name != "DEFAULT"

    def space(self, typed: typer.Context | None = None, **more: Any) -> SearchSpace:
        """The search space that the options mean.

        Args:
          typed: tells which of them were given (None: those with other texts than the usual).
          more: fields of `SearchSpace` that have no option here.
        """
        from layoutopt.space.decisions import ALLOW, ARGUMENTS, SearchSpace

        found, chosen = {name: ARGUMENTS[name].parse(value) for name, value in more.items()}, {*more}
        for name, argument in {"allow": ALLOW, **ARGUMENTS}.items():
            given = {o.name: getattr(self, o.parameter, None) for o in argument.options}
            said = {n: BETWEEN.join(v) if isinstance(v, list | tuple) else v for n, v in given.items()}
            if name not in more and (text := argument.read(said)) is not None:
                found[name] = argument.parse(text)  # whose refusals name the option
                if any(self._given(o, typed) for o in argument.options):
                    chosen.add(name)
        return SearchSpace(**found, given=frozenset(chosen))


def options(name: str, made: Iterable[Option], base: type, usual: bool = False) -> Any:
    """A group of options (`grouped`).

    Args:
      base: has the group's methods.
      usual: `Option.usual` is the default; else help only shows it.
    """
    found = []
    for o in made:
        kind = list[str] | None if o.several else str | None
        default = o.usual or None if usual and not o.several else None
        shown = True if default else o.usual
        info = typer.Option(
            o.name, metavar=o.metavar, help=o.help, show_default=shown, rich_help_panel=CHOICES
        )
        found.append((o.parameter, Annotated[kind, info], field(default=default)))
    return make_dataclass(name, found, bases=(base,), frozen=True)


def _options(names_axes: bool) -> Any:
    """Those of arguments that name axes of a mesh, or of the others."""
    asked = (o for o in listed()["asked"] if names_axes or o.name not in listed()["axes"])
    return options("AllowedOptions", asked, Allowed, usual=True)


OnMesh, OnAnyMesh = _options(True), _options(False)
