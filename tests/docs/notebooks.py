"""The cells of a notebook, run one after the other in one process, beside the outputs that it shows.

    python tests/docs/notebooks.py examples/first_steps.ipynb [--write]

prints all outputs; with `--write` they are put into the notebook. A cell's last expression is shown as
notebooks show it: its text, and its HTML if it has any. Jupyter is not needed, and gives the same.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SPENT = re.compile(r"(shown in |considered in |gap [\d.]+%, )[\d.]+\s?\w+")
"""How long a search took, which no two have in common."""


def code(notebook: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells that run."""
    return (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def outputs(notebook: Mapping[str, Any], folder: Path) -> list[list[dict[str, Any]]]:
    """What every cell shows, in the format of notebooks, run in a folder."""
    import pandas as pd

    names: dict[str, Any] = {"__name__": "__main__"}
    wide = pd.option_context("display.width", 80, "display.max_columns", 20)  # as in a kernel
    with contextlib.chdir(folder), wide:
        return [_run("".join(cell["source"]), names, n) for n, cell in enumerate(code(notebook), 1)]


def _run(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said, value = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    found: list[dict[str, Any]] = []
    if said.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": _lines(said.getvalue())})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        found.append(
            {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}
        )
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def comparable(shown: Any) -> str:
    """Outputs as a text that is the same in every run."""
    return SPENT.sub(r"\1…", json.dumps(shown, ensure_ascii=False, indent=1).replace("\u00a0", " "))


def main() -> None:
    """Runs a notebook, and prints what it shows or writes it into the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="put the outputs into the notebook")
    args = parser.parse_args()
    notebook = json.loads(args.notebook.read_text(encoding="utf-8"))
    os.environ.setdefault("COLUMNS", "110")
    with tempfile.TemporaryDirectory() as folder:
        shown = outputs(notebook, Path(folder))
    for n, (cell, found) in enumerate(zip(code(notebook), shown, strict=True), 1):
        cell["outputs"], cell["execution_count"] = found, n
        for each in found:
            print("".join(each["text"] if "text" in each else each["data"]["text/plain"]))
    if args.write:
        text = json.dumps(notebook, ensure_ascii=False, indent=1)
        args.notebook.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
