"""The commands of a page of documentation, run in one folder, beside what the page shows of their output.

    python tests/docs/console.py docs/tutorial.md

runs a page and prints all outputs, to be cut and put into the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CUT = "…"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A command, or a Python program, and the lines of output that the page shows."""

    kind: str
    source: str
    shown: tuple[str, ...]


def steps(page: str) -> list[Step]:
    """The `console` and `python` blocks in order; a `text` block right below Python is its output."""
    found: list[Step] = []
    after_python, end = False, 0
    for block in FENCE.finditer(page):
        kind, body = block.groups()
        if kind == "console":
            found += _commands(body)
        elif kind == "python":
            found.append(Step(kind, body, ()))
        elif kind == "text" and after_python and not page[end : block.start()].strip():
            found[-1] = Step("python", found[-1].source, tuple(body.splitlines()))
        after_python, end = kind == "python", block.end()
    return found


def _commands(body: str) -> list[Step]:
    joined = body.replace("\\\n", " ")
    parts = [part.splitlines() for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]]
    return [Step("console", part[0], tuple(part[1:])) for part in parts]


def run(step: Step, folder: Path) -> tuple[int, str]:
    """Exit code and output, both streams, of a step in a process of its own."""
    here = str(Path(sys.executable).parent)
    words = [sys.executable, "-c", step.source] if step.kind == "python" else shlex.split(step.source)
    paths = {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "110", "NO_COLOR": "1"}
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **paths, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def head(line: str) -> str:
    """What a line says without its numbers: its first cell or name."""
    first = re.split(r"  |[│┃:=(]", line.strip())[0].strip()
    return re.sub(r"\d[\d,.]*", "#", first)


def unlike(step: Step, output: str) -> list[str]:
    """Lines that the page shows and the output has nothing alike."""
    have = {head(line) for line in output.splitlines()}
    return [line for line in step.shown if line.strip() not in ("", CUT) and head(line) not in have]


def main() -> None:
    """Runs a page and prints what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(Path(sys.argv[1]).read_text(encoding="utf-8")):
            code, output = run(step, Path(folder))
            print(f"$ {step.source}\n{output}{f'[exit code {code}]' if code else ''}", flush=True)


if __name__ == "__main__":
    main()
