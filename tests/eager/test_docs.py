"""The code of docs/guides/eager.md runs, and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "eager.md"


def test_the_page_is_true() -> None:
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    printed = ""
    for kind, content in blocks:
        if kind == "text":
            assert printed == content
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(content, "model.py", "exec"), names)
        printed = output.getvalue()
    assert len(blocks) > 10
