"""A public function has at most ten parameters; commands, whose parameters are options, may have more."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("mesh_tf_core", "costmodels", "layoutopt", "reports")
COMMANDS = ROOT / "layoutopt" / "cli"
MOST = 10


def functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int]]:
    """(name, number of parameters besides self) of the public functions of a module's or a class's body."""
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            if not one.name.startswith("_") or one.name == "__init__":
                given = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
                own = [a for a in given if a.arg not in ("self", "cls")]
                yield prefix + one.name, len(own)
        elif isinstance(one, ast.ClassDef) and not one.name.startswith("_"):
            yield from functions(one.body, f"{prefix}{one.name}.")


def test_public_functions_have_at_most_ten_parameters() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}": count
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.is_relative_to(COMMANDS)
        for name, count in functions(ast.parse(path.read_text(encoding="utf-8")).body)
    }
    assert len(found) > 3000
    many = {name: count for name, count in found.items() if count > MOST}
    assert not many, f"make records of what belongs together in {many}"


def test_parameters_are_counted_wherever_they_stand() -> None:
    source = "def f(a, /, b, *c, d=1, **e): ...\nclass C:\n    def __init__(self, x): ...\n"
    source += "    @classmethod\n    def made(cls, x, y): ...\n    def _own(self, x): ...\n"
    source += "class _D:\n    def f(self): ...\n"
    assert [*functions(ast.parse(source).body)] == [("f", 3), ("C.__init__", 1), ("C.made", 2)]
