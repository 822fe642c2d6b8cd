"""What benchmarks import from this repository is still there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("layoutopt", "costmodels", "mesh_tf_core", "reports", "examples", "benchmarks")


def taken(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of ours, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            yield from ((str(node.module), alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    """Modules of benchmarks and examples are read, not imported: some of them set up devices for JAX."""
    if name in ("", "*") or (ROOT / Path(*module.split("."), f"{name}.py")).exists():
        return True
    if not module.startswith(("benchmarks", "examples")):
        found = importlib.import_module(module)
        return hasattr(found, name) or (ROOT / Path(*module.split("."), name)).is_dir()
    file = ROOT / Path(*module.split(".")).with_suffix(".py")
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.exists() else ()
    return any(name in (getattr(node, "name", ""), getattr(node, "id", "")) for node in nodes)


def test_every_import_of_a_benchmark_is_there() -> None:
    every = {
        (file.name, *each)
        for file in (ROOT / "benchmarks").rglob("*.py")
        for each in taken(file.read_text(encoding="utf-8"))
    }
    assert len(every) > 200
    assert [each for each in sorted(every) if not is_there(*each[1:])] == []


def test_one_that_is_gone_is_found() -> None:
    assert [*taken("def f():\n    from layoutopt import gone\n    import numpy")] == [("layoutopt", "gone")]
    assert not is_there("layoutopt", "gone")
    assert not is_there("benchmarks.known", "gone") and not is_there("benchmarks.gone", "main")
