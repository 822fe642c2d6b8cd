"""The code of docs/guides/extending.md and jax.md runs, block after block, and prints what stands below it;
the tables that the pages name are whole."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from layoutopt.importers.arrays import relations
from layoutopt.importers.arrays.build import TABLE
from layoutopt.importers.huggingface.form import FORMS
from mesh_tf_core.ir.kernel import UNARY
from mesh_tf_core.ops import unary
from tests.conformance import samples_elementwise
from tests.docs.console import steps

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "extending.md"


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """What the page adds to tables is gone after it."""
    with patch.dict(TABLE), patch.dict(FORMS):
        yield


@pytest.mark.parametrize("page, blocks", [("extending.md", 11), ("jax.md", 6)])
def test_the_page_is_true(page: str, blocks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    found = steps((PAGE.parent / page).read_text(encoding="utf-8"))
    assert len(found) == blocks
    for step in found:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(step.source, f"docs/guides/{page}", "exec"), names)
        assert output.getvalue().splitlines() == list(step.shown), step.source


def test_refused_primitives_are_those_without_a_handler() -> None:
    """The page names each primitive whose axes are known and that nothing computes, and no other."""
    page = (PAGE.parent / "jax.md").read_text(encoding="utf-8")
    section = page.partition("\n## Refused and different\n")[2].partition("\n| JAX construct")[0]
    said = {*re.findall(r"`(\w+)`", section)} - {"from_jax", "reduce_window"}
    assert (relations.ELEMENTWISE | relations.REDUCTIONS | relations.ALONG) - TABLE.keys() <= said
    assert not said & TABLE.keys()


def test_every_family_is_on_its_page_and_compared() -> None:
    page = (PAGE.parent / "huggingface.md").read_text(encoding="utf-8")
    named = {*re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))}
    data = PAGE.parents[2] / "tests" / "data"
    other = {n for n, (_, form) in FORMS.items() if form.remarks or form.varied}  # not as in transformers
    for file, left in (("huggingface_counts.json", {"nemotron-nas"}), ("huggingface_losses.json", other)):
        models = json.loads((data / file).read_text(encoding="utf-8"))["models"].values()
        assert FORMS.keys() - left <= {each["config"]["model_type"] for each in models} & named, file


def test_every_function_has_its_slope_and_its_reference() -> None:
    """Functions that are flat have no slope."""
    assert {name for name, row in UNARY.items() if not row.flat} == unary._SLOPES.keys()
    assert UNARY.keys() == samples_elementwise.UNARY.keys()
