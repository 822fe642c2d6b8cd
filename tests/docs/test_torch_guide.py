"""The guide to PyTorch modules: its program plans what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.console import steps
from tests.docs.test_jax_tutorial import follow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "torch.md"


@pytest.mark.nightly
def test_its_file_is_planned_as_shown(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    listed = [step for step in steps(PAGE.read_text(encoding="utf-8")) if step.kind in ("python", "console")]
    assert follow(listed, tmp_path) == ["train.py", "placed.py"]
