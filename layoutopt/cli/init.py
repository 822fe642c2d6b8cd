"""`layoutopt init`: a commented model file to start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from layoutopt.cli.options import JsonOption, QuietOption, examples, path_argument
from layoutopt.cli.terminal import Terminal

EXAMPLES = examples("layoutopt init", "layoutopt init my_model.py", "layoutopt init --jax train.py")


def init(
    path: Annotated[Path, path_argument("[FILE]", "The file to write.")] = Path("model.py"),
    jax: Annotated[bool, typer.Option("--jax", help="A model of a JAX loss.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a commented model.py to start from."""
    from mesh_tf_core.errors import UserError
    from mesh_tf_core.files import write_file

    terminal = Terminal(as_json, quiet)
    if path.suffix != ".py":
        raise UserError(f"{str(path)!r} is not a Python file; write for example layoutopt init model.py")
    if os.path.lexists(path) and not force:
        raise UserError(f"{str(path)!r} is there already; choose another name, or --force to replace it")
    starter = Path(__file__).with_name("starter_jax.py" if jax else "starter.py").read_text(encoding="utf-8")
    write_file(path, starter, "the model file")
    from layoutopt.plan.results import InitResult

    terminal.result(InitResult(path=str(path)))
    terminal.show(str(path))
    terminal.say(f'next: layoutopt search {path} --mesh "data:2;model:4"')
