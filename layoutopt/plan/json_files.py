"""Reading JSON files of users: one error that names the file, whatever is in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layoutopt.plan.units import clean
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import read_file

DEEPEST = 64
"""Levels of nesting that are read; a plan has at most ten."""


def check_depth(found: Any, what: str, again: str) -> None:
    """UserError if a JSON value has more than `DEEPEST` levels, because readers may be recursive."""
    level = [found]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _inside(value)]
    if level:
        raise UserError(f"{clean(what)} is nested too deeply; {again}")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()


def load_json(path: str | Path, what: str, again: str) -> Any:
    """The value in a JSON file.

    Args:
      what: name of the file in errors; again: the remedy.
    Raises:
      UserError: it cannot be read, is cut off, or nested too deeply.
    """
    try:
        text = read_file(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"{what} cannot be read: {why}; {again}") from None
    try:
        found = json.loads(text)
    except RecursionError:
        raise UserError(f"{what} is nested too deeply; {again}") from None
    except ValueError as error:
        raise UserError(
            f"{what} is not valid JSON ({error}; the file has {len(text):,} characters); {again}"
        ) from None
    return found
