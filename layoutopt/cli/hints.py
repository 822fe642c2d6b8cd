"""Hints for people who come from other tools: the word here for the word they typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import typer

from layoutopt.plan.units import some

OPTIONS = {
    **dict.fromkeys(
        ("--gpus", "--tpus", "--chips", "--num-devices", "--num-gpus", "--world-size"), "--devices"
    ),
    **dict.fromkeys(("--mem", "--hbm"), "--memory"),
    **dict.fromkeys(("--seconds", "--timeout"), "--time-limit"),
    "--output": "--out",
    "--epochs": "--steps",
}
"""Other tools' options by ours."""
FORMS = {
    "pytorch": "torchtitan",
    "torch": "torchtitan",
    "fsdp": "accelerate",
    "huggingface": "transformers",
    **dict.fromkeys(("flax", "equinox", "haiku", "keras"), "jax"),
    "tensorflow": "tf-dtensor",
    "tf": "tf-dtensor",
    "levanter": "haliax",
    "mtf": "mesh-tensorflow",
    "mesh_tensorflow": "mesh-tensorflow",
}
"""Libraries by the form that is nearest to theirs."""

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
    asked = getattr(error, "option_name", None)
    known = {name for param in context.command.params for name in getattr(param, "opts", ())}
    if asked is not None and asked.startswith("-"):
        value = _value(asked, words)
        if (ours := OPTIONS.get(asked)) in known:
            return f"write {ours}{f' {value}' if value else ''}"
        if near:
            return f"did you mean {' or '.join(near)}?"
        if commands := _commands_with(asked, context):
            return f"this is an option of {some(commands, NAMED)}"
        if "--set" in known and asked.startswith("--"):
            name = asked.removeprefix("--").replace("-", "_")
            return f"to set a hyperparameter, write --set {name}={value or 'VALUE'}"
    if getattr(getattr(error, "param", None), "name", None) == "to":
        form = FORMS.get(_value("--to", words).lower())
        return f"the nearest format is --to {form}" if form else ""
    return ""


def _commands_with(option: str, context: typer.Context) -> list[str]:
    """The other commands that have an option."""
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
