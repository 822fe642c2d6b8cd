"""Sentences of the command line, one file for each command in tests/cli/golden: its short help, results and
refusals, with # for every number.

Remake the files after a change that is meant (and read the difference): python -m tests.cli.golden
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

from typer.testing import CliRunner

from layoutopt.cli import app
from layoutopt.cli.listing import COMMANDS

FOLDER = Path(__file__).parent / "golden"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mlp.py"
NAMES = [name for panel in COMMANDS.values() for name in panel]
ON = "--mesh data:2;model:2 --hardware tpu-v3"
LAYOUT = "--layout batch:data;hidden:model"
TEXTS = {
    "layoutopt.toml": "[targets.pod]\nmesh = 'data:2;model:2'\nhardware = 'tpu-v3'\n",
    "wrong.toml": "devices = 3\n",
    "problem.json": json.dumps(
        {
            "format": "layoutopt-problem/1",
            "name": "two",
            "variables": [{"name": "batch", "labels": ["data", "none"]}],
            "terms": [{"name": "attention", "scope": [0], "table": [1, 2.5]}],
            "rows": [],
        }
    ),
    "broken.json": "{",
    "runs.csv": "model,mesh,layout,step_seconds\n"
    + "".join(f"model.py,data:{n},batch:data,{2e-4 / n}\n" for n in (2, 4, 8)),
    "few.csv": "model,mesh,layout,step_seconds\nmodel.py,data:2,batch:data,\n",
    "wrong.csv": "model,meshes,step_seconds\n",
}
"""Files of the folder that the commands run in, beside `model.py` and the plan of `MADE`."""
MADE = f"search model.py {ON} --allow usual --out plan.json --quiet"
LINES: dict[str, tuple[str, ...]] = {
    "search": (
        f"model.py {ON}",
        "model.py --target pod --objective memory --storage layout --microbatches 1 --allow usual",
        "--like plan.json --pin batch:data --allow usual",
        "model.py --mesh data:2 --set batch=4 --memory 120KiB --storage layout --microbatches 1 "
        "--hardware tpu-v3 --allow usual",
        "model.py --gpus 4",
        "model.py --devices four",
        "model.py --devices 4 --pin batch:a+b+c",
        "model.py --devices 4 --allow +pipelines",
        "model.py --target cloud",
        "no_model.py --devices 4",
        "",
    ),
    "explain": (
        "plan.json --model model.py --against batch:data",
        "plan.json --model model.py --against batch:none",
        "no_plan.json",
        "broken.json",
    ),
    "cost": (
        f"model.py {ON} {LAYOUT}",
        f"model.py {ON} {LAYOUT} --storage zero3 --tokens 3B --price 2.1",
        f"model.py {ON} --memory 100KiB",
        f"model.py {ON} --layout batch:pipe",
        f"model.py {ON} --layout btch:data",
        f"model.py {ON} {LAYOUT} --set btch=3",
        f"model.py {ON} {LAYOUT} --storage zero9",
        "model.py",
    ),
    "lint": (f"model.py {ON} --layout batch:data", f"model.py {ON} --layout batch:data;batch:model"),
    "candidates": (f"model.py {ON} -n 3 --allow usual", "model.py --mesh data:2 -n 0"),
    "learn": (
        "runs.csv --hardware tpu-v3",
        "wrong.csv --hardware tpu-v3",
        "few.csv --hardware tpu-v3",
        "runs.csv",
    ),
    "check": (
        "plan.json --model model.py --max-memory 90% --max-step 1.05x=plan.json",
        "plan.json --model model.py --max-step 0.5x=plan.json",
        f"model.py {ON} {LAYOUT} --max-step 2.5",
        "no_plan.json",
    ),
    "size": ("model.py --budget 1e20", "model.py"),
    "train": (
        "model.py --mesh data:2 --layout batch:data --steps 2 --held-out 1 --engine lockstep",
        "model.py --mesh data:2 --layout batch:data --steps 0",
        "model.py --layout plan.json --mesh data:2",
    ),
    "launch": ("-n 0 -- train model.py", "-n 2"),
    "generate": ("model.py --checkpoint nowhere", "model.py"),
    "calibrate": ("--mesh data", "--target tpu-v9 --out profile.json"),
    "validate": ("model.py --mesh data:2 --layouts 0",),
    "measure": (
        "model.py --mesh data:2 --layout batch:data --steps 1 --warm-up 1 --engine lockstep",
        "model.py --mesh data:2 --layout hidden:data;hidden_1:data",
    ),
    "verify": ("model.py --topology v5e:2x4 --layout batch:data", "model.py --topology v9:2 --mesh data:2"),
    "lower": ("model.py --mesh data:2 --layout batch:data", "model.py --mesh data:2 --emit nothing"),
    "report": ("plan.json --out report.html --model model.py", "broken.json --out report.html"),
    "export": (
        "plan.json --to jax --model model.py",
        "plan.json --to mesh-tensorflow --model model.py",
        "plan.json --to megatron --model model.py",
        "plan.json",
    ),
    "init": ("new.py", "model.py", "other.py --example nothing"),
    "hardware": ("", "tpu-v3", "tpu-v33"),
    "frameworks": ("", "torchtitan@0.3", "torchtitan:kernel=x"),
    "solve-problem": ("problem.json", "broken.json"),
}
"""Command -> what is typed behind it, beside -h."""
NUMBER = re.compile(r"(?<![\w#])[-+]?\d[\d,.]*(?:e[-+]?\d+)?|(?<=[a-z])\d+\b")
UNIT = re.compile(r"# [mµn]?s\b")
"""A time, whose unit changes from run to run where it is measured."""
PROGRESS = ("best so far", "searching ")
"""Beginnings of lines that a slow machine shows more often."""
DRAWN = re.compile(r"[━╇─┼┃│]+")


def made(folder: Path) -> None:
    """Fills a folder in which the commands can run."""
    shutil.copy(EXAMPLE, folder / "model.py")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    ran(MADE, folder)


def text_of(name: str, folder: Path) -> str:
    """All that a command says to its lines."""
    return "\n".join(ran(f"{name} {line}".strip(), folder) for line in ("-h", *LINES[name]))


def ran(line: str, folder: Path) -> str:
    """A command line, what it prints in the order in which people read it, and its exit code."""
    with chdir(folder):
        done = CliRunner().invoke(app, line.split(), prog_name="layoutopt", env={"COLUMNS": "1000"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    code = [f"[exit {done.exit_code}]"] * (done.exit_code != 0)
    return "\n".join([f"$ layoutopt {line}", *_lines(done.output), *code, ""])


def _lines(output: str) -> Iterator[str]:
    """What an output says, whatever its numbers, and however wide its columns."""
    for line in output.splitlines():
        text = UNIT.sub("# s", NUMBER.sub("#", DRAWN.sub(" ", line)))
        text = re.sub(" {2,}", "  ", text).rstrip()
        if text.strip() and not text.startswith(PROGRESS):
            yield text


def main() -> None:
    """Writes the files of the commands that are named, or all, anew."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.txt"):
        if path.stem not in NAMES:
            path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        made(Path(folder))
        for name in sys.argv[1:] or NAMES:
            (FOLDER / f"{name}.txt").write_text(text_of(name, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
