"""`layoutopt init`: a commented model file to start from, or one of the examples."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from layoutopt.cli.grouped import grouped
from layoutopt.cli.options import OUTPUT, Output, path_argument

FOLDER = "examples"
USUAL = Path("model.py")
MESH = '--mesh "data:2;model:4"'


def complete_example(incomplete: str) -> list[str]:
    """Names of examples, for the shell's completion."""
    return [name for name in example_names() if name.startswith(incomplete)]


@grouped
def init(
    path: Annotated[Path, path_argument("[FILE]", "File to write.")] = USUAL,
    jax: Annotated[
        bool, typer.Option("--jax", help="Write a model that is built from a JAX loss function.")
    ] = False,
    torch: Annotated[
        bool, typer.Option("--torch", help="Write a model that is built from a PyTorch module.")
    ] = False,
    example: Annotated[
        str | None,
        typer.Option(
            "--example",
            metavar="NAME",
            help="Write this example and the files it imports to examples/NAME.py, instead of FILE.",
            autocompletion=complete_example,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    output: Output = OUTPUT,
) -> None:
    """Write a commented model.py to start from, or an example."""
    from layoutopt.plan.results import InitResult
    from mesh_tf_core.errors import UserError
    from mesh_tf_core.files import write_file
    from mesh_tf_core.reading import read_text

    terminal = output.terminal
    if example is None:
        if path.suffix != ".py":
            raise UserError(f"{str(path)!r} does not end in .py; write for example `layoutopt init model.py`")
        if jax and torch:
            raise UserError("--jax and --torch write different files; remove one of them")
        starter = read_text(
            example_home() / "starters" / f"{'jax' if jax else 'torch' if torch else 'mesh_tf'}.py"
        )
        texts = {path: starter.replace("model.py", path.name)}
    else:
        if jax or torch or path != USUAL:
            extra = "--jax" if jax else "--torch" if torch else repr(str(path))
            raise UserError(f"--example {example} chooses the file to write; remove {extra}")
        texts = _of_example(example)
    first = next(iter(texts))
    # Helpers may be there already, of another example.
    new = {file: text for file, text in texts.items() if example is None or not _is(file, text)}
    taken = None if force else next((file for file in new if os.path.lexists(file)), None)
    if taken is not None:
        other = "" if example else "choose another name, or "
        raise UserError(f"{str(taken)!r} already exists; {other}add --force to overwrite the file")
    for file, text in new.items():
        write_file(file, text, "the model file")
    terminal.result(InitResult(path=str(first)))
    terminal.show(*map(str, texts))
    terminal.say(f"next: layoutopt search {first} {MESH}")


def _is(file: Path, text: str) -> bool:
    """Whether a file is there with exactly this text."""
    from mesh_tf_core.reading import read_file

    return file.is_file() and read_file(file) == text.encode()


def _of_example(name: str) -> dict[Path, str]:
    """Where the files of an example go, the example first, and what is in them."""
    from mesh_tf_core.reading import read_text

    return {Path(FOLDER, file.name): read_text(file) for file in example_files(name)}


@cache
def example_home() -> Path:
    """The folder of the examples: in the installed package, or in the checkout beside it. In a folder of this
    name they run unchanged, and so do the command lines of the documentation."""
    package = Path(__file__).resolve().parents[1]
    installed = package / FOLDER
    return installed if installed.is_dir() else package.parent / FOLDER


def example_names() -> list[str]:
    """Files with a function `model`; the others are helpers."""
    from mesh_tf_core.reading import read_text

    return [file.stem for file in sorted(example_home().glob("*.py")) if "\ndef model(" in read_text(file)]


def example_files(name: str) -> list[Path]:
    """An example and the example files that it imports, the example first.

    Raises:
      UserError: there is no such example.
    """
    from mesh_tf_core.errors import UserError, known_names
    from mesh_tf_core.reading import read_text

    known = example_names()
    if name not in known:
        raise UserError(f"--example {name!r} is not a known example; {known_names(name, known)}")
    found = [example_home() / f"{name}.py"]
    for file in found:  # grows
        for helper in _imports(read_text(file)):
            path = example_home() / f"{helper}.py"
            if path.is_file() and path not in found:
                found.append(path)
    return [*found, example_home() / "__init__.py"]


def _imports(text: str) -> list[str]:
    modules = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return [m.removeprefix(f"{FOLDER}.") for m in modules if m.startswith(f"{FOLDER}.")]
