"""Generated pages: each is what `python -m benchmarks.pages` writes from today's results and help."""

from __future__ import annotations

import pytest

from benchmarks.pages.listed import PAGES, written
from benchmarks.pages.tables import ROOT


@pytest.mark.parametrize("path", PAGES)
def test_the_page_is_what_its_source_makes(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == written(path), f"python -m benchmarks.pages {path}"


def test_every_page_of_results_is_generated() -> None:
    found = {str(p.relative_to(ROOT)) for p in (ROOT / "docs" / "results").glob("*.md")}
    assert found == {path for path in PAGES if path.startswith("docs/results/")}


def test_every_table_of_results_names_its_file() -> None:
    for path in (path for path in PAGES if path.startswith("docs/results/")):
        page = (ROOT / path).read_text(encoding="utf-8")
        assert any(stored in page for stored in ("`benchmarks/results/", "`tests/data/")), path
