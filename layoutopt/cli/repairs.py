"""Output of `search` where nothing fits: repairs, each with its price and its command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Any

import typer

from layoutopt.cli.options import THIS_MACHINE
from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import layout_text

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


if TYPE_CHECKING:
    from layoutopt.models.loading import Loaded
    from layoutopt.optimize.answers.infeasible import Diagnosis, Smaller
    from layoutopt.plan.details import Repair
    from mesh_tf_core.errors import NoLayoutError
    from mesh_tf_core.model import Model


def repairs_of(found: Diagnosis, context: typer.Context) -> tuple[Repair, ...]:
    """The repairs as plans list them; `context`: of the command that was typed."""
    from layoutopt.plan.build import axes_of
    from layoutopt.plan.details import Repair

    made = []
    for each in found.repairs:
        data, changed = each.plan.data, _changed(found.asked, each.asked)
        if each.parts > 1:
            changed["--set"] = settings_with(context.params.get("settings") or (), each.change)
        if "--hardware" in changed:
            changed["--set-hardware"] = None  # numbers of another machine
        made.append(
            Repair(
                change=each.change,
                command=command_line(context, changed),
                note=each.note,
                hardware=data.hardware,
                mesh=data.mesh,
                layout=layout_text(axes_of(each.plan.layout)),
                decided=data.in_short(),
                step_seconds=each.seconds,
                peak_memory_bytes=each.peak,
                memory_bytes=each.limit,
                mfu=each.plan.predicted.mfu,
                proven=each.proven,
            )
        )
    return tuple(made)


def smaller_batch(loaded: Loaded) -> Smaller | None:
    """The models of a file with less in a batch; None where no hyperparameter is the batch's size."""
    from layoutopt.models.loading import load_model

    name = loaded.model.batch_setting
    if name is None:
        return None
    size = loaded.hparams[name]

    def made(parts: int) -> tuple[str, Model] | None:
        if size % parts or size == parts:
            return None
        hparams = {**loaded.hparams, name: size // parts}
        return f"--set {name}={size // parts}", load_model(loaded.source, hparams).model

    return made


def settings_with(given: Sequence[str], change: str) -> tuple[str, ...]:
    """`--set`'s values, with one of them otherwise."""
    new = change.removeprefix("--set ")
    name = new.partition("=")[0]
    return (*(text for text in given if text.partition("=")[0].strip() != name), new)


def show_repairs(terminal: Terminal, repairs: Sequence[Repair]) -> None:
    """Prints repairs, the fastest first, then one command per line."""
    if not repairs:
        return
    from reports.views.layouts import repairs as view

    terminal.show(view(repairs), "")
    terminal.show_whole(*(each.command for each in repairs))


def refusal(
    error: NoLayoutError, found: Diagnosis, repairs: Sequence[Repair], as_json: bool
) -> NoLayoutError:
    """The error of a search that found nothing, with its conflict; repairs are in it for programs."""
    said = type(error)("; ".join(filter(None, (str(error), str(found) if as_json else found.why))))
    space = None if error.nearest is None else error.nearest.data.space
    said.more = {} if space is None else {"space": space.model_dump(mode="json")}
    said.more |= {"conflict": list(found.conflict), "repairs": [each.to_json() for each in repairs]}
    return said


def _changed(asked: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Changed]:
    """Options of `search` with which other arguments are asked: those that differ, whatever they are; None
    where the option is left out."""
    from layoutopt.optimize.entry import Limits, SearchSpace
    from layoutopt.space.decisions import ARGUMENTS

    usual = {**asdict(Limits()), "hardware": THIS_MACHINE, **SearchSpace().keywords}
    found: dict[str, Changed] = {}
    for name in dict.fromkeys((*asked, *now)):
        value, option = now.get(name), f"--{name.replace('_', '-')}"
        if value == asked.get(name):
            continue
        plain = _alike(value, usual.get(name))
        if name in ARGUMENTS:
            argument = ARGUMENTS[name]
            texts = argument.texts(argument.parse(value))
            found |= {o.name: None if plain else texts[o.name] for o in argument.options}
        else:
            found[option] = None if plain else _text(value)
    return found


def _alike(value: Any, other: Any) -> bool:
    """Whether two arguments ask for the same; the order of a list is none."""
    lists = isinstance(value, list | tuple) and isinstance(other, list | tuple)
    return {*value} == {*other} if lists else value == other


def _text(value: Any) -> str | None:
    """A value as its option has it; None where that is left out."""
    from costmodels.hardware import Hardware

    if isinstance(value, Hardware):
        return value.name
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value)) or None
    return None if value is None else str(value)
