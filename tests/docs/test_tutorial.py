"""The tutorial: every command runs, in order, and prints what stands below it (other numbers apart)."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from layoutopt.cli import app
from tests.docs.console import MEASURES, PROGRESS, Step, anew, head, run, steps, surroundings, unlike
from tests.marks import by_day

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "tutorial.md"


def here(step: Step, folder: Path, patch: pytest.MonkeyPatch) -> tuple[int, str]:
    """As `run`, in this process."""
    words = [] if step.kind == "python" else shlex.split(step.source)
    if words[:1] != ["layoutopt"]:
        return run(step, folder)
    patch.chdir(folder)
    done = CliRunner(env=surroundings(folder)).invoke(app, words[1:], prog_name="layoutopt")
    return done.exit_code, PROGRESS.sub("", done.output)


@pytest.mark.slow
@pytest.mark.parametrize("every", by_day([False, True]))
def test_every_command_runs(every: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By day those that run no steps, without a process for each."""
    found = steps(PAGE.read_text(encoding="utf-8"))
    chosen = [step for step in found if every or not any(word in step.source for word in MEASURES)]
    assert len(found) > 12 and len(chosen) > 8
    for step in chosen:
        code, output = run(step, tmp_path) if every else here(step, tmp_path, monkeypatch)
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


def test_a_new_output_is_cut_where_the_page_cuts_the_old_one() -> None:
    assert anew(["one  1 s"], ["one  2 s", "two  3 s"]) == ["one  2 s", "two  3 s"]
    shown, now = (
        ["step  3 ms", "…", "loss  0.1", "gone  1"],
        ["hint", "step  4 ms", "", "rate  7", "loss  0.2"],
    )
    assert anew(shown, now) == ["…", now[1], "…", now[4]]
    assert anew(["step 1/9: 4 s", "…"], ["step 1/9: 5 s", "", "step 9/9: 5 s"]) == ["step 1/9: 5 s", "…"]
