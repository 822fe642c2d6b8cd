"""Numbers of a hardware file set by name: "a100, node_egress=100GB/s" is the a100 with another network.

Such a text is a name like any other: plans keep it, and whoever reads one again gets the same machine.
"""

import os
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from types import NoneType
from typing import Any, get_args, get_type_hints

from costmodels.hardware import links, model, numbers
from mesh_tf_core.errors import UserError, known_names

_TOPOLOGIES = {each.kind: each for each in links.TOPOLOGIES}
_VALUE = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)", re.ASCII)


class HardwareError(UserError):
    """A hardware name is unknown, or a hardware file is invalid or has no value for a required number."""


def with_settings(name: str, settings: Sequence[str]) -> str:
    """The name of a machine with some of its numbers set."""
    return ", ".join((name, *(s.strip() for s in settings)))


def split_name(text: str) -> tuple[str, tuple[str, ...]]:
    """A machine's own name or file, and the numbers that are set."""
    if os.path.isfile(text):
        return text, ()
    name, *settings = (part.strip() for part in text.split(","))
    return name, tuple(settings)


def changed(content: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of the content of a hardware file with numbers set, named after them.

    Args:
      settings: "key=value" each: a number's path, or the end of one; a value with its unit.

    Raises:
      HardwareError: no such number, several of that name, or no value.
    """
    content = deepcopy(content)
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        found = _VALUE.fullmatch(value)
        if not key or found is None:
            raise HardwareError(
                f"hardware setting {setting!r} is not NAME=NUMBER with a unit, e.g. node_egress=100GB/s"
            )
        for place in _places(content, key, setting):
            _set(content, place, float(found[1]), found[2])
    content["name"] = with_settings(content["name"], settings)
    return content


def _set(content: dict[str, Any], path: tuple[str, ...], value: float, unit: str) -> None:
    *parents, last = path
    room: Any = content
    for part in parents:
        room = room[int(part)] if isinstance(room, list) else room.setdefault(part, {})
    own: Any = int(last) if isinstance(room, list) else last
    known = "1" if isinstance(room, dict) and not room.get(own) else room[own]["unit"]
    room[own] = {
        "value": value,
        "unit": unit or (known if known == "count" else "1"),
        "source": "set by the user",
        "date": datetime.now(UTC).date().isoformat(),
    }


def _places(content: dict[str, Any], key: str, setting: str) -> list[tuple[str, ...]]:
    """Paths of the numbers that a key names: one, or one for every group size."""
    known, wanted = [*_numbers(content, ()), *_unset(content)], tuple(key.split("."))
    named_by: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in known:
        for end in range(len(wanted), len(path) + 1):
            if path[:end][-len(wanted) :] == wanted:
                named_by.setdefault(path[:end], []).append(path)
    exact = {k: v for k, v in named_by.items() if k == wanted} or named_by
    places = [path for paths in exact.values() for path in paths]
    if not places:
        raise HardwareError(
            f"hardware setting {setting!r}: {content['name']} has no number {key!r}; "
            f"{known_names(key, sorted({_short(path) for path in known}))}"
        )
    sizes = len(exact) == 1 and all(path[-1].isdecimal() for path in places)
    if len(places) > 1 and not sizes:
        names = ", ".join(".".join(path) for path in places)
        raise HardwareError(
            f"hardware setting {setting!r} is ambiguous: it could mean {names}; give one of these names"
        )
    return places


def _short(path: tuple[str, ...]) -> str:
    """How a number is called in messages: without its room, and without a group's size."""
    return ".".join(part for part in path[1:] if not part.isdecimal()) or path[0]


def _numbers(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of the numbers that a file has."""
    if path and path[0] not in ("chip", "topology", "overlap"):
        return
    if isinstance(value, dict) and "value" in value:
        yield path
    elif isinstance(value, dict | list):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, (*path, str(part)))


def _unset(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of the numbers that a file may have and has not."""
    for purpose in get_args(model.Purpose):
        if purpose not in content.get("overlap", {}):
            yield "overlap", purpose
    rooms = (("chip", model.Chip), ("topology", _TOPOLOGIES.get(content["topology"].get("kind"), NoneType)))
    for room, cls in rooms:
        for name, hint in get_type_hints(cls).items() if cls is not NoneType else ():
            if get_args(hint) == (numbers.Number, NoneType) and not content[room].get(name):
                yield room, name
