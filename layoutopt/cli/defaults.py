"""Options that give others their values: `--target` of `layoutopt.toml`, `--like` of a plan.

A command reads these options first and uses their content as defaults, so typed options override them.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from layoutopt.cli.listing import COMMANDS, unpadded
from layoutopt.space.option import listed

if TYPE_CHECKING:
    from layoutopt.plan.build import Plan

Values = dict[str, Any]
"""Parameter -> its value, as the command line has it."""
FILE = "layoutopt.toml"
START = "layoutopt.start"
"""Key of the plan of `--like` in the context's `meta`: a search predicts its layout first."""
LARGEST_FILE = 1 << 20
"""Bytes of `FILE`."""
TARGETS = "targets"
"""The table of `FILE` with one table for each target."""
NAMES = {name for panel in COMMANDS.values() for name in panel}
REPLACES = {
    "mesh": ("devices", "max_axes"),
    "devices": ("mesh", *(option.removeprefix("--") for option in listed()["axes"])),
    "hardware": ("set_hardware", "memory"),
}
"""Parameters -> parameters whose defaults no longer apply."""


class Command(TyperCommand):
    """A command that takes defaults from the options that `add_sources` gave it.

    Attributes:
      sources: the names of these options.
    """

    sources: tuple[str, ...] = ()

    def format_help(self, *given: Any) -> None:
        with unpadded():
            super().format_help(*given)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        typed: Mapping[str, Any] = {}
        if not ctx.resilient_parsing and not {"--help", "-h"} & {*args}:
            typed = self.make_parser(ctx).parse_args(args=list(args))[0]
        found: Values = {}
        for name in self.sources:
            if typed.get(name) is not None:
                found |= SOURCES[name].read(ctx, typed[name], {**found, **typed})
        without = {other for name in typed if typed[name] is not None for other in REPLACES.get(name, ())}
        ctx.default_map = {name: value for name, value in found.items() if name not in without}
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if getattr(error.param, "name", "") in ctx.default_map:
                said = " and ".join(f"--{name} {typed[name]}" for name in self.sources if typed.get(name))
                error.message += f", found in {said}"
            raise


@dataclass(frozen=True)
class OptionSource:
    """An option that gives others their values.

    Attributes:
      read: computes values for the parsed command from the option and other options.
      only: the command that has it; "": all with a MODEL.
    """

    read: Callable[[typer.Context, str, Mapping[str, Any]], Values]
    only: str = ""


def add_sources(command: Any) -> None:
    """Gives a command the options of `SOURCES` that are for it."""
    names = {param.name for param in command.params}
    made = _made() if "model" in names else {}
    command.sources = tuple(n for n, s in SOURCES.items() if n in made and s.only in ("", command.name))
    command.params += [made[name] for name in command.sources]


def _made() -> dict[str, Any]:
    """The options, which only `Command` reads."""
    alone = typer.Typer(add_completion=False)

    @alone.command()
    def options(
        target: Annotated[
            str | None,
            typer.Option(
                metavar="NAME",
                help=f"Use the options of this target in {FILE}, beside MODEL or in the current folder.",
                expose_value=False,
            ),
        ] = None,
        like: Annotated[
            str | None,
            typer.Option(
                metavar="PLAN.json",
                help="Use the options of the search that made this plan, and its model if MODEL is omitted.",
                expose_value=False,
            ),
        ] = None,
    ) -> None: ...

    return {str(param.name): param for param in typer.main.get_command(alone).params}


def of_target(ctx: typer.Context, name: str, known: Mapping[str, Any]) -> Values:
    """The options of a target that a command has.

    Choices apply only to commands that search; a table with the command's name has options of that command
    only.

    Raises:
      UserError: no such file or target, or an option that no command has.
    """
    from mesh_tf_core.errors import UserError, known_names

    path = _file_beside(known.get("model"))
    targets = _read(path)
    if name not in targets:
        raise UserError(f"--target {name}: {path} has no target of this name; {known_names(name, targets)}")
    where, said = f"{path}: target {name!r}", targets[name]
    if not isinstance(said, dict):
        raise UserError(f"{where} must be a table of options, [{TARGETS}.{name}], but is {said!r}")
    own = {key: value for key, value in said.items() if not (key in NAMES and isinstance(value, dict))}
    asked = set() if "allow" in {p.name for p in ctx.command.params} else {o.name for o in listed()["asked"]}
    found = _values(ctx, {k: v for k, v in own.items() if _option(k) not in asked}, where)
    return found | _values(ctx, said.get(ctx.command.name, {}), f"{where}, {ctx.command.name}")


def _values(ctx: typer.Context, said: Mapping[str, Any], where: str) -> Values:
    """The options of a table that a command has."""
    from mesh_tf_core.errors import UserError

    options, found = {name: p for p in ctx.command.params for name in p.opts}, Values()
    for key, value in said.items():
        if param := options.get(_option(key)):
            found[str(param.name)] = _value(param, value, f"{where}: {key}")
        elif _option(key) not in (every := _every_option(ctx)):
            near = next(iter(get_close_matches(_option(key), every)), "")
            hint = f"did you mean {near}?" if near else f"see {ctx.command_path} --help"
            raise UserError(f"{where}: no command has the option {_option(key)}; {hint}")
    return found


def _option(key: str) -> str:
    """The option that a key of a table names."""
    return f"--{key.replace('_', '-')}"


def _file_beside(model: object) -> Path:
    """The file beside a model file; where MODEL is a module's name or left out, in the current folder."""
    folder = Path(os.path.expanduser(str(model or "").partition(":")[0])).parent
    beside = folder / FILE
    return beside if os.path.lexists(beside) else Path(FILE)


def _read(path: Path) -> dict[str, Any]:
    """The targets of a file."""
    from mesh_tf_core.errors import UserError
    from mesh_tf_core.reading import check_depth, read_text, reading

    if not os.path.lexists(path):
        raise UserError(
            f"--target: no file {FILE} beside the model or in the current folder; write this file "
            f"with a table [{TARGETS}.NAME] of options, e.g. devices = 64"
        )
    with reading(str(path), "correct this file"):
        content = tomllib.loads(read_text(path, LARGEST_FILE))
        check_depth(content)
    targets = content.get(TARGETS)
    if content.keys() != {TARGETS} or not isinstance(targets, dict):
        other = ", ".join(name for name in content if name != TARGETS)
        found = f"also contains {other}" if other else "contains no such table"
        raise UserError(f"{path} must contain only tables [{TARGETS}.NAME] of options, but {found}")
    return targets


def _every_option(ctx: typer.Context) -> set[str]:
    commands = getattr(ctx.find_root().command, "commands", {})
    words = {word for each in commands.values() for param in each.params for word in param.opts}
    return {word for word in words if word.startswith("--")}


def _value(param: Any, value: Any, where: str) -> Any:
    """A value of a file as an option takes it: lists with commas, tables as NAME=VALUE or as rules.

    Raises:
      UserError: a value of a kind that no option takes.
    """
    from mesh_tf_core.errors import UserError

    if param.is_flag:
        if not isinstance(value, bool):
            raise UserError(f"{where} = {value!r}: must be true or false")
        return value
    table = isinstance(value, dict)
    between = "=" if "=" in (param.metavar or "") else ":"
    words = [f"{k}{between}{v}" for k, v in value.items()] if table else value
    words = words if isinstance(words, list) else [words]
    if not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in words):
        raise UserError(
            f"{where} = {value!r}: must be a string, a number, or a list or table of strings and numbers"
        )
    if param.multiple:
        return [*map(str, words)]
    return (";" if table else ",").join(map(str, words))


def of_plan(ctx: typer.Context, path: str, known: Mapping[str, Any]) -> Values:
    """The options of the search that made a plan.

    Raises:
      UserError: the file is not a plan; or MODEL is left out and the plan's model has changed.
    """
    from layoutopt.cli.plans import say_damage, trusted_model
    from layoutopt.plan.build import load_plan

    plan, file = load_plan(path, say_damage), Path(path)
    ctx.meta[START] = plan
    found = {**_where(plan), **_chosen(plan)}
    if known.get("model") is None:
        found["model"] = trusted_model(plan, file, "search MODEL --like PLAN")
    if known.get("model") in (None, plan.data.details.source):
        found["settings"] = _settings(plan.question.command)
    return found


def _where(plan: Plan) -> Values:
    """What the plan is for: devices, hardware, memory."""
    from layoutopt.cli.plans import hardware_of

    question, machine = plan.question, hardware_of(plan)
    found: Values = {"hardware": machine, "objective": question.objective}
    if plan.data.framework is not None:
        found["framework"] = plan.data.framework
    if question.devices is None:
        found["mesh"] = str(plan.mesh)
    else:
        found |= {"devices": question.devices, "max_axes": question.max_axes}
    if question.memory_bytes is not None:
        found["memory"] = f"{question.memory_bytes}B"
    return found


def _chosen(plan: Plan) -> Values:
    """What might be chosen, as far as it was not the usual."""
    from layoutopt.space.allow import allowed_by
    from layoutopt.space.decisions import ARGUMENTS, SearchSpace

    asked = allowed_by(plan.question).but(**plan.question.first)  # of any framework
    usual, several = (
        SearchSpace().settled(plan.question.objective),
        {o.name for o in listed()["asked"] if o.several},
    )
    found: Values = {}
    for name, argument in ARGUMENTS.items():
        value = getattr(asked, name)
        if value != getattr(usual, name) and not (name == "microbatches" and plan.question.by_ranks):
            for option, text in argument.texts(value).items():
                found[option.removeprefix("--").replace("-", "_")] = [text] if option in several else text
    return {name: value for name, value in found.items() if value not in (None, [None])}


def _settings(command: str) -> list[str]:
    """The hyperparameters that a command line set."""
    from mesh_tf_core.reading import reading

    with reading("--like: the plan's search command", "give MODEL, and its options, instead of --like"):
        words = shlex.split(command)
    return [value for option, value in pairwise(words) if option == "--set"]


SOURCES = {"like": OptionSource(of_plan, "search"), "target": OptionSource(of_target)}
"""Parameter -> where it finds values; a later one counts more."""
