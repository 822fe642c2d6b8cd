"""Arguments of scripts: each has a type that its function accepts, or the error is one line.

Type checkers use annotations. Without one, a wrong argument would cause an error deep inside the library, or
a wrong result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from mesh_tf_core.errors import UserError


@dataclass(frozen=True)
class ArgumentKind:
    """A kind of argument: a test of a value, and words for an error.

    Attributes:
      holds: whether a value is of the kind.
      words: follow "give" in an error, as in "give a function".
    """

    holds: Callable[[Any], bool]
    words: str


def is_whole(value: Any) -> bool:
    """True if it is a whole number, of NumPy's too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True if it is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def at_least(least: int) -> ArgumentKind:
    """A whole number."""
    return ArgumentKind(
        lambda value: is_whole(value) and value >= least, f"a whole number of at least {least}"
    )


def instance(types: type | tuple[type, ...], words: str) -> ArgumentKind:
    """An object of one of some types."""
    return ArgumentKind(lambda value: isinstance(value, types), words)


def is_iterable(value: Any) -> bool:
    """True if a value has elements one after the other; an array without axes only seems to."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def optional(kind: ArgumentKind) -> ArgumentKind:
    """Also None."""
    return ArgumentKind(lambda value: value is None or kind.holds(value), f"{kind.words}, or None")


PATH = instance((str, os.PathLike), "a path, as a string or a pathlib.Path")
FUNCTION = ArgumentKind(callable, "a function")
BATCH = instance(Mapping, "a dict of arrays by the names of the model's inputs")
BATCHES = ArgumentKind(
    lambda value: is_iterable(value) and not isinstance(value, str | Mapping),
    "a list or generator of batches, each a dict of arrays",
)


def check(what: str, **given: tuple[Any, ArgumentKind]) -> None:
    """Raises UserError unless every argument is of its kind.

    Args:
      what: name of the function, as the user calls it.
      given: name -> the argument and its allowed types.
    """
    for name, (value, kind) in given.items():
        if not kind.holds(value):
            raise UserError(f"{what}: {name} is {shown(value)}; give {kind.words}")


def shown(value: Any) -> str:
    """A value in an error: plain values as they are written, others by their type."""
    plain = value is None or isinstance(value, str | bool | int | float)
    kind = type(value).__name__
    return repr(value)[:100] if plain else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
