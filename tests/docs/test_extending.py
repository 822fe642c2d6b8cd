"""The code of docs/guides/extending.md runs, block after block, and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.docs.console import steps

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "extending.md"


def test_the_page_is_true(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    found = steps(PAGE.read_text(encoding="utf-8"))
    assert len(found) == 9
    for step in found:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(step.source, "docs/guides/extending.md", "exec"), names)
        assert output.getvalue().splitlines() == list(step.shown), step.source
