"""Names and places of the nodes of torch.export."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from layoutopt.importers.torch.capture import MODULE, own_line
from layoutopt.importers.torch.elementwise import TABLE


def name_of(n: Any) -> str:
    """An operation's name, without its library and overload."""
    target = str(n.target)
    return target.split(".")[1] if "." in target else target


@cache
def place_of(trace: str) -> str:
    """The user's own line of a trace; in a module of PyTorch, that of its code."""
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return own_line((), places) or (":".join(places[-1]) if places else "")


def writes(name: str) -> bool:
    """True for an operation in place."""
    return name.endswith("_") and not name.endswith("__") and name not in TABLE


def is_batch_norm(n: Any) -> bool:
    """True for each of its forms."""
    return "batch_norm" in str(n.target)


def scope_of(path: str) -> str:
    """The path of a module, as scopes have it."""
    path = path.removeprefix("L['self'].").removeprefix("L__self__").lstrip(".")
    return re.sub(r"[^\w./\-]+", "", path.removeprefix(MODULE).lstrip(".").replace(".", "/"))
