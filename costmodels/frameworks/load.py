"""Finds and reads frameworks: those of the package, the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from costmodels.frameworks.framework import VERSION, Framework
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.faults import at_path
from mesh_tf_core.reading import read_json, reading

_DATA = Path(__file__).parent / "data"
DEFAULT = "layoutopt"
"""The framework of a program that this project compiles and runs itself."""


class FrameworkError(UserError):
    """A framework, its variant or its option is unknown, or its file is invalid."""


@cache
def framework_names() -> tuple[str, ...]:
    """The names of the frameworks, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.json")))


def load_framework(text: str) -> Framework:
    """Reads a framework.

    Args:
      text: `NAME[@VERSION][:variant=option,…]`; NAME is of `framework_names()`, or the path of a framework
        file.

    Raises:
      FrameworkError: the name, a variant or an option is unknown, or the file is invalid.

    Example:
      >>> import costmodels
      >>> costmodels.load_framework("torch").text
      'torch'
    """
    head, _, tail = (text, "", "") if os.path.isfile(text) else text.partition(":")
    name, _, version = (head, "", "") if os.path.isfile(head) else map(str.strip, head.partition("@"))
    found = _preset(name) if name in framework_names() else _parsed(_content(name))
    if found.says not in (known := (found.name, *framework_names())):
        raise FrameworkError(f"framework {name!r} says {found.says!r}; {known_names(found.says, known)}")
    chosen = {VERSION: version} if version else {}
    for variant, _, option in (each.partition("=") for each in tail.split(",") if each.strip()):
        if (variant := variant.strip()) in chosen:
            raise FrameworkError(f"framework {text!r} gives {variant} twice; give it once")
        chosen[variant] = option.strip()
    for variant, option in chosen.items():
        _check(found, variant, option, text)
    # A plan that is opened in another folder finds it there.
    file = "" if name in framework_names() else os.path.abspath(name)
    return found.model_copy(update={"chosen": chosen, "file": file})


def _check(found: Framework, variant: str, option: str, text: str) -> None:
    if variant not in found.variants:
        raise FrameworkError(
            f"framework {text!r}: {found.name} has no variant {variant!r}; "
            f"{known_names(variant, found.variants)}"
        )
    if option not in (options := found.variants[variant].options):
        why = f"has no option {option!r}" if option else "needs an option"
        raise FrameworkError(f"framework {text!r}: {variant} {why}; {known_names(option, options)}")


@cache
def _preset(name: str) -> Framework:
    return _parsed(_content(name))


def _content(name: str) -> dict[str, Any]:
    """The content of a framework's file; one that is `like` another has all of it that it does not say."""
    if name not in framework_names() and not os.path.isfile(name):
        missing = name.endswith(".json") or len(Path(name).parts) > 1
        found = "does not exist" if missing else "is not known"
        raise FrameworkError(f"framework {name!r} {found}; {known_names(name, framework_names())}")
    path = _DATA / f"{name}.json" if name in framework_names() else Path(name)
    with reading(f"framework file {str(path)!r}", error=FrameworkError):
        content = read_json(path)
    if not isinstance(content, dict):
        raise FrameworkError(f"framework file {str(path)!r} is not a JSON object")
    like = content.pop("like", None)
    own = content.get("name", name) if like is None or path.parent == _DATA else None
    content = {**({} if own is None else {"says": own}), **content}
    return content if like is None else merged(_content(str(like)), content)


def _parsed(content: dict[str, Any]) -> Framework:
    try:
        return Framework.model_validate(content)
    except ValidationError as error:
        faults = [at_path(".".join(map(str, e["loc"])) or "the file", e["msg"]) for e in error.errors()]
        raise FrameworkError(
            f"framework {content.get('name', '?')!r} is invalid: {'; '.join(faults)}"
        ) from None


def merged(base: Any, own: Any) -> Any:
    """`base` with what `own` says in its place, without what is null there; numbers and curves are replaced
    whole, with their sources."""
    mappings = isinstance(base, Mapping) and isinstance(own, Mapping)
    if not mappings or {"value", "points"} & own.keys():
        return own
    said = {k: merged(base.get(k), v) for k, v in own.items() if v is not None}
    return {**{k: v for k, v in base.items() if k not in own}, **said}
