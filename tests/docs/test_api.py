"""The API reference: made from docstrings, with every public name."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 118_880
"""Of all packages together. It changes downwards alone, as those below."""
MOST_LINES_OF_RUNTIME = 13_482
"""Of `lower`, `tracing` and `ir`."""
MOST_ENTERED = 566, 63
"""Functions, but for nameless ones, and files of `mesh_tf_core` that lowering four layers in an interleaved
schedule enters."""
ENTERED = """
import sys
import mesh_tf_core as mtf
from examples.transformer_lm import model

def enter(frame, event, _):
    code = frame.f_code
    if event == "call" and "/mesh_tf_core/" in code.co_filename and not code.co_name.startswith("<"):
        seen.add((code.co_filename, code.co_qualname))

built, seen = model(layers=4), set()
options = mtf.Options(microbatches=4, schedule="interleaved:2")
built.step_graph
sys.setprofile(enter)
built.lower(mtf.Mesh("pipe:2;data:2"), mtf.Layout("layers:pipe;batch:data"), options)
sys.setprofile(None)
print(len(seen), len({file for file, _ in seen}))
"""


def test_the_makefile_names_all_packages() -> None:
    (packages,) = re.findall(
        r"^PUBLIC := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert set(packages.split()) == {p.parent.name for p in ROOT.glob("*/py.typed")}


@pytest.mark.parametrize("package", ["layoutopt", "costmodels"])
def test_every_public_name_has_its_place(package: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdoc", "--docformat", "google", "-o", str(tmp_path), package]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    page = (tmp_path / f"{package}.html").read_text(encoding="utf-8")
    assert [n for n in importlib.import_module(package).__all__ if f'id="{n}"' not in page] == []


@pytest.mark.parametrize("package", ["layoutopt", "costmodels", "mesh_tf_core", "reports"])
def test_every_public_name_says_what_it_is(package: str) -> None:
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in module.__all__}
    assert [n for n, each in found.items() if callable(each) and not (each.__doc__ or "").strip()] == []


def test_a_file_of_a_package_is_one_room() -> None:
    """As docs/guides/contributing.md says."""
    assert {name: count for name, count in lines().items() if count > 400} == {}


def test_the_packages_do_not_grow() -> None:
    """Whoever adds lines takes as many away."""
    assert sum(lines().values()) <= MOST_LINES
    runtime = tuple(f"mesh_tf_core/{room}/" for room in ("lower", "tracing", "ir"))
    own = sum(count for name, count in lines().items() if name.startswith(runtime))
    assert own <= MOST_LINES_OF_RUNTIME


LAYERS = {"Constant", "Conv", "CrossEntropy"}
"""Operations, written by these names in stored programs, and what users' models call that makes them."""


def test_a_class_name_means_one_thing() -> None:
    found = Counter(
        node.name
        for file in lines()
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, times in found.items() if times > 1} == LAYERS


def test_lowering_enters_no_more_functions() -> None:
    command = [sys.executable, "-c", ENTERED]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert all(int(n) <= most for n, most in zip(found, MOST_ENTERED, strict=True)), found


def lines() -> dict[str, int]:
    """File of a package -> its lines."""
    packages = [path.parent for path in ROOT.glob("*/py.typed")]
    files = (file for package in packages for file in package.rglob("*.py"))
    return {str(f.relative_to(ROOT)): len(f.read_text(encoding="utf-8").splitlines()) for f in files}
