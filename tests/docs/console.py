"""The commands of a page of documentation, run in one folder, beside what the page shows of their output.

    python tests/docs/console.py docs/guides/tutorial.md [--write] [--predicted]

runs a page and prints all outputs; with `--write` they are put into the page, cut where the page cuts them.
With `--predicted` it ends before the first command that measures, whose outputs need a quiet machine.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CUT = "…"
MEASURES = ("layoutopt train", "layoutopt calibrate", "layoutopt validate", "--validation")
"""In commands that run steps or measure, or read what these wrote; they take most of the time."""
PROGRESS = re.compile(r"^(?:best so far|searching) .*\n", re.MULTILINE)
"""What a search prints on its way, another in every run."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A command, or a Python program, and the lines of output that the page shows."""

    kind: str
    source: str
    shown: tuple[str, ...]
    span: tuple[int, int] = field(default=(0, 0), compare=False)
    """Where in the page the shown lines stand."""


def steps(page: str) -> list[Step]:
    """The `console` and `python` blocks in order; a `text` block right below Python is its output."""
    found: list[Step] = []
    after_python, end = False, 0
    for block in FENCE.finditer(page):
        kind, body = block.groups()
        if kind == "console":
            found += _commands(body, block.start(2))
        elif kind == "python":
            found.append(Step(kind, body, ()))
        elif kind == "text" and after_python and not page[end : block.start()].strip():
            found[-1] = Step("python", found[-1].source, tuple(body.splitlines()), block.span(2))
        after_python, end = kind == "python", block.end()
    return found


COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def _commands(body: str, start: int) -> list[Step]:
    return [
        Step(
            "console",
            found[1].replace("\\\n", " "),
            tuple(found[2].splitlines()),
            (start + found.start(2), start + found.end(2)),
        )
        for found in COMMAND.finditer(body)
    ]


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a page's commands."""
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    return {**paths, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "110", "NO_COLOR": "1"}


def run(step: Step, folder: Path) -> tuple[int, str]:
    """Exit code and output, both streams, of a step in a process of its own."""
    words = [sys.executable, "-c", step.source] if step.kind == "python" else shlex.split(step.source)
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **surroundings(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, PROGRESS.sub("", done.stdout)


def head(line: str) -> str:
    """What a line says without its numbers: its first cell or name."""
    first = re.split(r"  |[│┃:=(]", line.strip())[0].strip()
    return re.sub(r"\d[\d,.]*", "#", first)


def unlike(step: Step, output: str) -> list[str]:
    """Lines that the page shows and the output has nothing alike."""
    have = {head(line) for line in output.splitlines()}
    return [line for line in step.shown if line.strip() not in ("", CUT) and head(line) not in have]


def anew(shown: Sequence[str], output: Sequence[str]) -> list[str]:
    """The lines of a new output for those a page shows of an old one: of lines that say the same (`head`),
    the likest. All of them if the page cut nothing."""
    cut = next((line for line in shown if line.strip() == CUT), None)
    if cut is None:
        return list(output)
    found: list[str] = []
    at = -1
    for line in (line for line in shown if line.strip() not in ("", CUT)):
        alike = [i for i in range(at + 1, len(output)) if head(output[i]) == head(line)]
        if not head(line):
            alike = [i for i in alike if i == at + 1]
        if not alike:
            continue
        likeness = {i: difflib.SequenceMatcher(None, line, output[i]).ratio() for i in alike}
        same = max(alike, key=lambda i, likeness=likeness: (likeness[i], -i))
        between = output[at + 1 : same]
        found += [cut] if any(text.strip() for text in between) else between
        found.append(output[same])
        at = same
    return [*found, cut] if any(line.strip() for line in output[at + 1 :]) else found


def main() -> None:
    """Runs a page, and prints what it printed or writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true", help="put the outputs into the page")
    parser.add_argument("--predicted", action="store_true", help="end before the first that measures")
    args = parser.parse_args()
    page = args.page.read_text(encoding="utf-8")
    parts, end = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for step in steps(page):
            if args.predicted and any(word in step.source for word in MEASURES):
                break
            file = re.match(r"# (\w+\.py)\n", step.source)
            if step.kind == "python" and file:
                (Path(folder) / file[1]).write_text(step.source, encoding="utf-8")
                continue
            code, output = run(step, Path(folder))
            print(f"$ {step.source}\n{output}{f'[exit code {code}]' if code else ''}", flush=True)
            if step.span != (0, 0):
                lines = [line.rstrip() for line in output.splitlines()]
                parts += [page[end : step.span[0]], *(f"{line}\n" for line in anew(step.shown, lines))]
                end = step.span[1]
    if args.write:
        args.page.write_text("".join([*parts, page[end:]]), encoding="utf-8")


if __name__ == "__main__":
    main()
