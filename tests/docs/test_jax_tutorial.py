"""The JAX tutorial: its files, programs and commands, in order, print what stands below them (other numbers
apart); by day those that take seconds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.console import Step, run, steps, unlike

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "jax_tutorial.md"


def follow(listed: list[Step], folder: Path) -> list[str]:
    """Runs steps in a folder; the files that they were written to."""
    written = []
    for step in listed:
        file = re.match(r"# (\w+\.py)\n", step.source)
        if step.kind == "python" and file:
            (folder / file[1]).write_text(step.source, encoding="utf-8")
            written.append(file[1])
            continue
        code, output = run(step, folder)
        assert code == 0, f"$ {step.source}\n{output}"
        assert unlike(step, output) == [], f"$ {step.source}\n{output}"
    return written


def test_its_model_has_the_dimensions_that_it_shows(tmp_path: Path) -> None:
    listed = steps(PAGE.read_text(encoding="utf-8"))
    first = next(i for i, step in enumerate(listed) if step.kind == "console")
    assert follow(listed[:first], tmp_path) == ["train.py"]


@pytest.mark.nightly
def test_every_step_runs(tmp_path: Path) -> None:
    assert follow(steps(PAGE.read_text(encoding="utf-8")), tmp_path) == ["train.py", "run.py"]
