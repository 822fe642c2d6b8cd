"""The site: every page of docs is built, reachable from the index, without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.mark.nightly
def test_the_site_has_every_page_in_its_contents(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    index = (tmp_path / "README.html").read_text(encoding="utf-8")
    listed = set(re.findall(r'class="reference internal" href="([\w/]+\.html)"', index))
    pages = {str(p.relative_to(DOCS).with_suffix(".html")) for p in DOCS.rglob("*.md")}
    assert pages - listed == {"README.html"}
    assert [page for page in pages if not (tmp_path / page).exists()] == []


def test_files_outside_of_docs_are_named_and_not_linked(tmp_path: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")]
    assert any("](../ARCHITECTURE.md)" in page for page in pages)
    sys.path.insert(0, str(DOCS))
    try:
        from conf import of_site
    finally:
        sys.path.remove(str(DOCS))
    assert of_site("guides/jax", "[code](../../ARCHITECTURE.md), [page](size.md#laws)") == (
        "code, [page](size.md#laws)"
    )
