"""The examples that come with the package: their names, and the files that each needs.

An example imports its helpers as `examples.text`. In a folder `examples` it runs without changes, and so do
the command lines of the documentation.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.reading import read_text

FOLDER = "examples"


@cache
def home() -> Path:
    """The folder of the examples: in the installed package, or in the checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / FOLDER
    return installed if installed.is_dir() else package.parent / FOLDER


def starter(library: str) -> Path:
    """The model file to start from, of a library: mesh_tf, jax or torch."""
    return home() / "starters" / f"{library}.py"


def names() -> list[str]:
    """Files with a function `model`; the others are helpers."""
    return [file.stem for file in sorted(home().glob("*.py")) if "\ndef model(" in read_text(file)]


def files(name: str) -> list[Path]:
    """An example and the example files that it imports, the example first.

    Raises:
      UserError: there is no such example.
    """
    known = names()
    if name not in known:
        raise UserError(f"--example {name!r} is not a known example; {known_names(name, known)}")
    found = [home() / f"{name}.py"]
    for file in found:  # grows
        for helper in _imports(read_text(file)):
            path = home() / f"{helper}.py"
            if path.is_file() and path not in found:
                found.append(path)
    return [*found, home() / "__init__.py"]


def _imports(text: str) -> list[str]:
    modules = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return [m.removeprefix(f"{FOLDER}.") for m in modules if m.startswith(f"{FOLDER}.")]
