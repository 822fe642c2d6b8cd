"""The command line as a typer application; commands are imported on use.

Hints for people who come from other tools: the word here for the word they typed.
"""

from __future__ import annotations

import importlib
import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from layoutopt.cli.defaults import Command, add_sources
from layoutopt.cli.exits import fail, handled
from layoutopt.cli.listing import COMMANDS, PLANNING, PURPOSE, VERSION, short_listing, show_help
from layoutopt.cli.panels import asks_short, into_panels, short_help
from layoutopt.plan.units import some
from layoutopt.runtime import signals

DEGREES = {
    "devices": ("data", "batch:data"),
    "tp": ("model", "heads:model"),
    "pp": ("stage", "layers:stage"),
    "dp": ("data", "batch:data"),
    "cp": ("context", "length:context"),
    "ep": ("expert", "experts:expert"),
    "sp": ("model", "length@elsewhere:model"),
}
"""Degrees that other tools take, the usual axis and what it splits."""
ADVICE = {
    "nodes": "--mesh has the devices of all nodes",
    "gpus-per-node": "--hardware says it; --mesh has the devices of all nodes",
    "micro-batch": "write the batch of all devices, --set batch=N, and --microbatches N",
}
"""Advice where we have no such option."""
SETTINGS = ("batch", "length", "dtype")
"""Hyperparameters that models have."""
DTYPES = ("bfloat16", "float16", "float32")

UNPARSED = re.compile(", unable to parse string as an? (integer|number)$")
"""The end of a message of typer's that says nothing new."""
VALUE = re.compile(r"Invalid value for (?:'[^']*' / )*'([^']*)': (.*)", re.DOTALL)
"""A message of typer's about the value of an option, and the option's longest name."""
NAMED = 3
"""Commands that are named."""
NEAR = 0.8
"""How alike a word and an option are at least where one is a slip of the other."""


def usage(error: typer.TyperException, words: Sequence[str]) -> str:
    """The fault of a command line in one line, with the correct command.

    Args:
      words: the command line.
    """
    asked, alike = getattr(error, "option_name", ""), getattr(error, "possibilities", None)
    vars(error)["possibilities"] = None  # `_hint` says them
    text = error.format_message().replace("Value error, ", "").replace(". Did you", "; did you").strip()
    text = text.rstrip(".")
    if refused := VALUE.fullmatch(text):
        from mesh_tf_core.faults import at_path  # help waits for no part of the runtime

        text = at_path(*refused.groups())
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    given = [_value(name, words) for name in getattr(getattr(error, "param", None), "opts", ())]
    found = next(filter(None, given), "")
    if found and repr(found) not in text:
        text = f"{UNPARSED.sub('', text)}, found {found!r}"
    near = get_close_matches(asked, alike or (), cutoff=NEAR)
    near = near or [option for option in alike or () if option.startswith(asked)]
    hint = _hint(error, context, words, near)
    said = "; ".join(filter(None, (text, hint, f"see {context.command_path} --help")))
    return said.replace("?; ", "? ")


def _hint(error: Any, context: typer.Context, words: Sequence[str], near: Sequence[str]) -> str:
    asked, param = getattr(error, "option_name", None), getattr(error, "param", None)
    from mesh_tf_core.errors import meant

    known = {o for param in context.command.params for o in getattr(param, "opts", ()) if o.startswith("-")}
    if asked is not None and asked.startswith("-"):
        value = _value(asked, words)
        degree = meant(asked, DEGREES)
        if degree and "--mesh" in known and f"--{degree}" not in known:
            (axis, rule), size = DEGREES[degree], value or "N"
            option = "--pin" if "--pin" in known else "--layout"
            return f'an axis of the mesh is for this: --mesh "{axis}:{size};…" {option} "{rule}"'
        if ours := meant(asked, known):
            of: Any = next(p for p in context.command.params if ours in p.opts)
            said = meant(value, re.findall(r"[\w:-]+", of.help)) or value or of.metavar
            return f"write {ours}{f' {said}' if said else ''}"
        if "--mesh" in known and (other := meant(asked, ADVICE)):
            return ADVICE[other]
        if near:
            return f"did you mean {' or '.join(near)}?"
        if commands := _commands_with(asked, context):
            return f"this is an option of {some(commands, NAMED)}"
        if "--set" in known and asked.startswith("--"):
            name, dtype = asked.removeprefix("--").replace("-", "_"), meant(value or asked, DTYPES)
            name = "dtype" if dtype and not value else meant(asked, SETTINGS) or name
            return f"to set a hyperparameter, write --set {name}={dtype or value or 'VALUE'}"
    if param and (ours := meant(_value(param.opts[-1], words), re.findall("'([^']+)'", error.message)[1:])):
        return f"write {param.opts[-1]} {ours}"
    return ""


def _commands_with(option: str, context: typer.Context) -> list[str]:
    every: dict[str, Any] = getattr(context.find_root().command, "commands", {})
    return [
        name
        for name, command in every.items()
        if any(option in getattr(param, "opts", ()) for param in command.params)
    ]


def _value(option: str, words: Sequence[str]) -> str:
    """What follows an option, where it is given last."""
    found = ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            found = "" if following.startswith("-") else following
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


CTRL_C = 130  # 128 + SIGINT


class CommandGroup(TyperGroup):
    """The commands, and where their errors turn into exit codes."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "commands": _Commands()})

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        given: Sequence[str] | None = args[0] if args else kwargs.get("args")
        words = sys.argv[1:] if given is None else given
        if asks_short(words) and (len(words) == 1 or words[0] in self.commands):
            name = words[0] if len(words) == 2 else ""
            print(short_help(self.commands[name], f"layoutopt {name}") if name else short_listing())
            sys.exit(0)
        if words and words[0] in self.commands:
            from mesh_tf_core.engines.jax import compat

            # A model file may start JAX: to plan takes no accelerator from a job.
            if words[0] in PLANNING or not compat.accelerated():
                compat.stay_on_cpu()
        as_json = "--json" in words
        # But for `train`, which hears all, a worker of several has nothing to save by itself.
        several = any(word.partition("=")[0] in ("--cluster", "--coordinator") for word in words)
        numbers = (signal.SIGINT,) if several else signals.ENDING
        with handled(words):
            try:
                with signals.command(numbers):
                    code = super().main(*args, **kwargs)
                sys.stdout.flush()
            except typer.TyperException as error:
                fail(usage(error, words), error.exit_code, as_json)
            except typer.Abort:
                fail("stopped", signals.exit_code(), as_json)
        # Typer knows one code for KeyboardInterrupt, whichever signal raised it.
        sys.exit(signals.exit_code() if code == CTRL_C else code if isinstance(code, int) else 0)

    def format_help(self, *_: Any) -> None:
        show_help()

    def list_commands(self, *_: Any) -> list[str]:
        return [*self.commands]


EXAMPLES = Path(__file__).with_name("examples.json")
"""Command -> lines that work, as its help and the reference show them."""


class _Commands(Mapping[str, Any]):
    """Name -> command, of the function of that name in the module of that name; each is made once."""

    def __init__(self) -> None:
        self._panels = {name: panel for panel, listed in COMMANDS.items() for name in listed}
        self._made: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._panels)

    def __len__(self) -> int:
        return len(self._panels)

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            panel, word = self._panels[name], name.replace("-", "_")
            with signals.nothing_to_keep(lambda: None):
                module = importlib.import_module(f"layoutopt.cli.{word}")
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            registered = alone.command(name, cls=Command, epilog=_examples(name), rich_help_panel=panel)
            registered(getattr(module, word))
            made = self._made[name] = typer.main.get_command(alone)
            add_sources(made)
            into_panels(made)
        return self._made[name]


def _examples(name: str) -> str:
    """The end of a command's help: lines that work."""
    lines: list[str] = json.loads(EXAMPLES.read_text(encoding="utf-8")).get(name, [])
    return "\n\n".join(["Examples:" if len(lines) > 1 else "Example:", *lines])


app = typer.Typer(cls=CommandGroup, pretty_exceptions_enable=False, help=PURPOSE)


def _print_version(asked: bool) -> None:
    """Prints the installed version and ends, when `--version` was given."""
    if asked:
        from importlib.metadata import version

        typer.echo(version("layoutopt"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help=VERSION)
    ] = False,
) -> None:
    """Handles the options before a command."""
    if context.invoked_subcommand is None:
        context.get_help()
