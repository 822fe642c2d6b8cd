"""The tutorial: every command runs, in order, and prints what stands below it (other numbers apart)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.console import Step, head, run, steps, unlike

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path) -> None:
    found = steps(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 12
    for step in found:
        code, output = run(step, tmp_path)
        expected = 2 if any(line.startswith("error: ") for line in step.shown) else 0
        assert code == expected, f"$ {step.source}\n{output}"
        assert unlike(step, output) == [], f"$ {step.source}\n{output}"


def test_steps_of_a_page() -> None:
    console = "```console\n$ one \\\n  -x\nout 1\n…\n$ two\n```\n"
    page = console + "text\n```python\nprint(1)\n```\n\n```text\n1\n```\n"
    assert steps(page) == [
        Step("console", "one    -x", ("out 1", "…")),
        Step("console", "two", ()),
        Step("python", "print(1)\n", ("1",)),
    ]


def test_lines_that_are_not_printed_are_found() -> None:
    step = Step("console", "x", ("step  3 ms", "…", "gone  1", "  2 │ a"))
    assert unlike(step, "step   41 ms = 7\n 11 │ b\n") == ["gone  1"]
    assert head("step 6/60: loss 0.1") == "step #/#"
