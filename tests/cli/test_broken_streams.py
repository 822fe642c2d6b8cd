"""Streams that are closed, full, or have few characters: one line, the right exit code, nothing else."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from layoutopt.cli import streams
from layoutopt.cli.terminal import Terminal
from layoutopt.plan.results import InitResult
from reports.views.view import View, texts

ROOT = Path(__file__).resolve().parents[2]


class Stream(io.TextIOWrapper):
    """Text as a terminal of some encoding gets it."""

    def __init__(self, encoding: str = "ascii") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    @property
    def text(self) -> str:
        self.flush()
        found = self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]
        assert isinstance(found, str)
        return found


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_terminals_without_our_characters(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    out, err = Stream(encoding), Stream(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with streams.open_streams():
        terminal = Terminal()
        rows = [("1 – 2", "≥ 3 → 4"), ("é", "日本\ud800")]
        terminal.show(View("Prices × 2", texts("µs", "±"), rows))
        terminal.say("wrote “plan” …")
        Terminal(as_json=True).result(InitResult(path="é×日"))
    lines = out.text
    if encoding == "ascii":
        assert "Prices x 2" in lines and "us" in lines and "+-" in lines and "1 - 2" in lines
        assert ">= 3 -> 4" in lines and "e" in lines and "???" in lines and err.text == 'wrote "plan" ...\n'
    if encoding == "utf-8":
        assert "Prices × 2" in lines and "日本\ufffd" in lines and err.text == "wrote “plan” …\n"
    assert json.loads(lines[lines.index("{") :])["path"] == "é×日"


def test_messages_that_cannot_be_written_keep_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Stream()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", full)
        terminal = Terminal()
        terminal.say("lost")
        terminal.show("kept")
        with pytest.raises(OSError, match="No space"):
            full.flush()
        streams.let_go(full)  # what is left goes nowhere
    assert out.text == "kept\n"


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (
            ">&-",
            2,
            "error: the result cannot be printed: Bad file descriptor; free disk space",
        ),
        (
            ">/dev/full",
            2,
            "error: the result cannot be printed: No space left on device; free disk space",
        ),
        (">/dev/null 2>&-", 0, ""),
        (">/dev/null 2>/dev/full", 0, ""),
        ("2>/dev/full --no-such-option", 2, ""),
        ("--out x >&- 2>&-", 2, ""),
    ],
)
@pytest.mark.one_in(6)
def test_streams_that_a_shell_closes(redirection: str, code: int, said: str) -> None:
    """In a process of its own, whose streams these are."""
    line = f"{sys.executable} -m layoutopt hardware tpu-v2 {redirection}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.startswith(said) and done.stderr.count("\n") == (1 if said else 0)
