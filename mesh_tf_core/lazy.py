"""Packages that load names on first use, so that importing a package is fast.

A package lists its names once, as imports that only a type checker executes:

    if TYPE_CHECKING:
        from package.module import name

    __getattr__, __dir__ = lazily(__name__, __all__)
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any


def lazily(package: str, names: list[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package with these public names."""
    return partial(load, package), lambda: names


def load(package: str, name: str) -> Any:
    """Loads a name of a package, which keeps it.

    Raises:
      AttributeError: no import of the package names it.
    """
    found = sys.modules[package]
    home = _homes(str(found.__file__)).get(name)
    if home is None:
        raise no_attribute(package, name, dir(found))
    if home == package:  # a module of its own
        return importlib.import_module(f"{home}.{name}")
    value = getattr(importlib.import_module(home), name)
    setattr(found, name, value)
    return value


def no_attribute(package: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error of a package without such a name, with similar names: Python adds these only to tracebacks,
    so notebooks and logs lack them."""
    near = [] if name.startswith("_") else difflib.get_close_matches(name, known)
    said = f"module {package!r} has no attribute {name!r}"
    if not near:
        return AttributeError(said)
    # With a name Python would say the nearest once more.
    return AttributeError(f"{said}; did you mean {' or '.join(map(repr, near))}?", name="")


@cache
def _homes(file: str) -> dict[str, str]:
    """Name -> module, of the imports that a type checker executes."""
    from mesh_tf_core.reading import read_text  # itself of a package that is lazy

    tree = ast.parse(read_text(file))
    blocks = (s for s in tree.body if isinstance(s, ast.If) and ast.unparse(s.test) == "TYPE_CHECKING")
    imports = (i for block in blocks for i in block.body if isinstance(i, ast.ImportFrom))
    return {alias.name: str(i.module) for i in imports for alias in i.names}
