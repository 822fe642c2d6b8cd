"""The comparison with Mesh-TensorFlow names only what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import layoutopt
import mesh_tf_core as mtf
from examples import recipes
from mesh_tf_core.renamed import RENAMED

ROOT = Path(__file__).parents[1]
MARKS = {"=", "+", "~", "–"}


def rows() -> list[list[str]]:
    """Cells of every row that compares: theirs, ours, mark, note."""
    lines = (ROOT / "docs" / "guides" / "mesh_tensorflow.md").read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.strip().strip("|").split(" | ")] for line in lines if line[:1] == "|"]
    return [row for row in cells if len(row) == 4 and row[0] not in ("theirs", "---")]


def ours() -> list[str]:
    return sorted({name for row in rows() for name in re.findall(r"`([^`]+)`", row[1])})


@pytest.mark.parametrize("name", ours())
def test_what_is_named_exists(name: str) -> None:
    if name.startswith("examples/"):
        assert (ROOT / name).is_file()
        return
    if name.startswith("layoutopt "):
        assert (ROOT / "layoutopt" / "cli" / f"{name.split()[1]}.py").is_file()
        return
    found: object = mtf
    for part in name.split("(")[0].removeprefix("mtf.").split("."):
        found = getattr(found, part)


def test_every_recipe_that_is_named_exists() -> None:
    named = {name for row in rows() for name in re.findall(r"\[`(\w+)`\]\(recipes\.md\)", row[3])}
    assert len(named) > 8
    assert [name for name in named if not hasattr(recipes, name)] == []


def test_every_row_has_a_mark_and_what_is_missing_is_marked() -> None:
    assert len(rows()) > 60
    for theirs, own, mark, _ in rows():
        assert mark in MARKS, theirs
        assert (mark == "–") == (own == "–"), theirs


@pytest.mark.parametrize(
    ("package", "name", "said"),
    [
        (layoutopt, "serch", "module 'layoutopt' has no attribute 'serch'; did you mean 'search'?"),
        (mtf.layers, "FeedForwrd", "'mesh_tf_core.layers' has no .*; did you mean 'FeedForward'?"),
        (mtf, "xyzzy", "module 'mesh_tf_core' has no attribute 'xyzzy'$"),
    ],
)
def test_a_slip_of_a_name_is_told_what_is_near(package: object, name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(package, name)


@pytest.mark.parametrize("theirs", RENAMED)
def test_a_name_of_mesh_tensorflow_is_told_ours(theirs: str) -> None:
    with pytest.raises(AttributeError, match=rf"use mtf\.{RENAMED[theirs]} instead of .* mtf\.{theirs}$"):
        getattr(mtf, theirs)
    found: object = mtf
    for part in RENAMED[theirs].split("."):
        found = getattr(found, part)
    assert any(theirs in row[0] for row in rows())
