"""Hyperparameters: the named defaults of a model function, and texts `name=value` read by their types."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.errors import UserError, known_names

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Default:
    """A parameter of a model function; `given` says whether it has a default `value`."""

    value: Any = None
    given: bool = True
    annotation: str = ""

    @property
    def kind(self) -> str:
        """bool, int, float, str, or "any" for a default without a type."""
        for kind in (bool, int, float, str):
            if type(self.value) is kind and self.given:
                return kind.__name__
        named = self.annotation.replace(" ", "").removesuffix("|None")
        return named if named in ("bool", "int", "float", "str") else "any"


class Defaults(dict[str, Default]):
    """Hyperparameters by name.

    Attributes:
      open: the function takes others too, by **hparams. also: other name -> its own.
    """

    open = False
    also: Mapping[str, str] = {}

    def check(self, names: Iterable[str], before: str) -> None:
        """UserError for a name that the function does not take; `before` begins it."""
        for name in names if not self.open else ():
            if name not in self:
                raise UserError(f"{before} has no hyperparameter {name!r}; {known_names(name, self)}")


def defaults_of(function: Callable[..., Any], source: str) -> Defaults:
    """The hyperparameters of a model function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UserError(
            f"{source}: the parameters of {function!r} cannot be read; write an ordinary Python function"
        ) from None
    found = Defaults()
    found.also = getattr(function, "also", {})
    found.open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for p in parameters:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        if p.kind is p.POSITIONAL_ONLY:
            raise UserError(
                f"{source}: parameter {p.name!r} is positional-only and cannot be set by name; remove the "
                "'/' from the signature"
            )
        annotation = p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", "")
        has = p.default is not p.empty
        found[p.name] = Default(
            p.default if has else None, has, "" if p.annotation is p.empty else annotation
        )
    return found


def parse_settings(settings: Sequence[str], defaults: Defaults, source: str) -> dict[str, Any]:
    """Parses texts `name=value`; the type of the name's default, or else the form of the text, decides the
    type.

    Raises:
      UserError: not `name=value`, an unknown name, or a value of another type.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name, text = defaults.also.get(name.strip(), name.strip()), text.strip()
        if not equals or not name:
            raise UserError(f"--set {setting!r} is not NAME=VALUE; write for example --set layers=12")
        defaults.check([name], f"--set {setting}: {source}")
        default = defaults.get(name, Default())
        try:
            values[name] = _value(text, default)
        except ValueError:
            raise UserError(
                f"--set {setting}: {text!r} is not {_ASKED[default.kind]}, which {name!r} requires "
                f"(default: {default.value!r})"
            ) from None
    return values


_ASKED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a finite number",
    "str": "text",
    "any": "a finite value",
}


def _value(text: str, default: Default) -> Any:
    if default.kind in ("int", "float") and not text.isascii():
        raise ValueError(text)
    if text.lower() == "none" and (default.value is None or "None" in default.annotation):
        return None
    found = _READ[default.kind](text)
    if isinstance(found, float) and not math.isfinite(found):
        raise ValueError(text)
    return found


def _bool(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(text)
    return text.lower() in _TRUE


def _int(text: str) -> int:
    """A whole number, also as 1e6 or 1_000."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _any(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


_READ: dict[str, Callable[[str], Any]] = {"bool": _bool, "int": _int, "float": float, "str": str, "any": _any}
