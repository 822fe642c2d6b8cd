"""Docstrings of public names begin with their subject, and a type has a name that no other module defines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("mesh_tf_core", "costmodels", "layoutopt", "reports")
RIDDLES = ("What", "Of", "Whether")
"""First words whose sentence has no subject: "Of a ring, what runs meanwhile"."""


def text_of(statement: ast.stmt) -> str | None:
    """The docstring that a statement is, if it is one."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else None
    return None


def documented(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, docstring) of the public functions, classes and constants of a module's or a class's body."""
    for one, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not one.name.startswith("_"):
                if (text := text_of(one.body[0])) is not None:
                    yield prefix + one.name, text
                if isinstance(one, ast.ClassDef):
                    yield from documented(one.body, f"{prefix}{one.name}.")
        elif isinstance(one, ast.Assign | ast.AnnAssign) and following is not None:
            name = ast.unparse(one.targets[0] if isinstance(one, ast.Assign) else one.target)
            if (text := text_of(following)) is not None and not name.startswith("_"):
                yield prefix + name, text


def riddles(source: str) -> list[str]:
    """The public names of a module whose docstrings begin with a word of `RIDDLES`; "" is the module."""
    body = ast.parse(source).body
    found = [*documented(body)]
    if body and (text := text_of(body[0])) is not None:
        found.append(("", text))
    return [name for name, text in found if text.split(maxsplit=1)[:1] and text.split()[0] in RIDDLES]


def test_docstrings_begin_with_their_subject() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}: {name or 'the module'}"
        for path in paths
        for name in riddles(path.read_text(encoding="utf-8"))
    ]
    assert len(paths) > 600
    assert not found, f"begin these with a noun, a verb or 'True if', not with {RIDDLES}: {found}"


def test_riddles_are_seen_wherever_they_stand() -> None:
    source = '"""What it is."""\nA = 1\n"""Of a."""\n_B = 2\n"""Of b."""\nclass C:\n    """Ours."""\n'
    source += '    x: int\n    """Whether x."""\n    def f():\n        """What f does."""\n'
    assert riddles(source) == ["A", "C.x", "C.f", ""]


def types(source: str) -> set[str]:
    """The classes and type aliases that a module defines."""
    found = set()
    for one in ast.parse(source).body:
        targets = one.targets if isinstance(one, ast.Assign) else getattr(one, "target", None)
        names = (
            [one] if isinstance(one, ast.ClassDef) else targets if isinstance(targets, list) else [targets]
        )
        for name in names:
            text = getattr(name, "name", None) or getattr(name, "id", "")
            if text[:1].isupper() and not text.isupper():
                found.add(text)
    return found


def test_a_type_has_a_name_of_its_own() -> None:
    """Except an operation and its layer or initializer, sources of operations and of weights, and clusters of
    processes and of operations."""
    shared = {"Cluster", "Constant", "Conv", "CrossEntropy", "Source"}
    where: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in types(path.read_text(encoding="utf-8")):
                where.setdefault(name, []).append(str(path.relative_to(ROOT)))
    found = {name: paths for name, paths in where.items() if len(paths) > 1 and name not in shared}
    assert len(where) > 1000
    assert not found, f"give each of these types a name that says whose it is: {found}"
