"""The JAX tutorial, where Flax is installed: its files, programs and commands, in order, print what stands
below them (other numbers apart)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.console import run, steps, unlike

PAGE = Path(__file__).resolve().parents[2] / "docs" / "jax_tutorial.md"


@pytest.mark.slow
def test_every_step_runs(tmp_path: Path) -> None:
    pytest.importorskip("flax")
    written = []
    for step in steps(PAGE.read_text(encoding="utf-8")):
        file = re.match(r"# (\w+\.py)\n", step.source)
        if step.kind == "python" and file:
            (tmp_path / file[1]).write_text(step.source, encoding="utf-8")
            written.append(file[1])
            continue
        code, output = run(step, tmp_path)
        assert code == 0, f"$ {step.source}\n{output}"
        assert unlike(step, output) == [], f"$ {step.source}\n{output}"
    assert written == ["train.py", "run.py"]
