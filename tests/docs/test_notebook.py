"""The notebook: every cell runs, in order, and shows what stands below it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.notebooks import code, comparable, outputs

FILES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_cell_shows_what_stands_below_it(file: Path, tmp_path: Path) -> None:
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) > 10
    shown = outputs(notebook, tmp_path)
    for cell, now in zip(code(notebook), shown, strict=True):
        assert comparable(now) == comparable(cell["outputs"]), "".join(cell["source"])
    assert {"plan.json", "report.html"} <= {path.name for path in tmp_path.iterdir()}


def test_there_is_a_notebook() -> None:
    assert FILES
