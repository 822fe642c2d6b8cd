"""The files of a model: the record of them in a plan, and whether they are unchanged.

A plan is data, and running a model file runs code. A plan therefore never decides which code runs. Its own
name of the model is used only for a .py file, or a configuration, below the current folder, and only if this
file and every local file that it imports still have the SHA-256 that the plan records. All of this is read,
and nothing run, before that is known.

A local file lies below one of the folders that a model file imports from: its own, that of its package, and
the current folder. Imports are found in the text of the files, at any depth; `loaded` adds those that a
running model found otherwise. Data that a model file reads, and code that it runs itself (`exec`), are not
checked.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from mesh_tf_core.errors import UserError
from mesh_tf_core.reading import read_file

Hashes = Mapping[str, str]
"""Path from the folder of the model file, with '/', to SHA-256."""
FUNCTION = "model"
"""The function that builds a model, where no other function of the file is named."""
MOST = 200
"""Characters of a name that an error repeats."""
_FILE = re.compile(r"(?P<file>.+\.(?:py|json))(?::(?P<function>[^:/]*))?")


def file_and_function(source: str) -> tuple[Path, str] | None:
    """The model file or configuration that a MODEL names, and the function in it; None for an installed
    module."""
    match = _FILE.fullmatch(source)
    if match is None:
        return None
    return Path(os.path.expanduser(match["file"])), match["function"] or FUNCTION


def search_folders(path: Path) -> tuple[str, tuple[Path, ...]]:
    """The module that a file is, and the folders that it imports from."""
    name, top = path.stem, path.parent
    while (top / "__init__.py").is_file():
        name, top = f"{top.name}.{name}", top.parent
    return name, tuple(dict.fromkeys((top, path.parent)))


def hashes(path: Path, loaded: Iterable[Path] = ()) -> dict[str, str]:
    """Every local file of the model file at `path`, by its hash.

    Args:
      loaded: files of modules that its model has imported.
    """
    folders = local_folders(path)
    also = (file for file in loaded if file.is_file() and is_local(file, folders))
    found = [*closure(path), *also]
    return {_shown(file, path): hashlib.sha256(read_file(file)).hexdigest() for file in dict.fromkeys(found)}


def trusted(source: str, recorded: Hashes) -> dict[Path, bytes]:
    """The texts of the model that a plan names, each at its place, if they may be run.

    Args:
      source: MODEL as the user typed it when the plan was made.

    Raises:
      UserError: it may not, and why.
    """
    named = file_and_function(source)
    if named is None:
        raise UserError(f"the plan's model {source[:MOST]!r} is not a .py or .json file")
    file, function = str(named[0])[:MOST], named[1]
    if not os.path.isfile(named[0]):
        raise UserError(f"the plan's model file {file!r} does not exist")
    path = named[0].resolve()
    if not path.is_relative_to(Path.cwd().resolve()):
        raise UserError(f"the plan's model file {file!r} is not below the current folder")
    if not recorded:
        raise UserError(f"the plan records no SHA-256 of its model file {file!r}")
    for each in closure(path):
        if (name := _shown(each, path)) not in recorded:
            raise UserError(f"the plan records no SHA-256 of {name!r}, which its model file {file!r} imports")
    texts: dict[Path, bytes] = {}
    for name, digest in recorded.items():
        each = path.parent / name
        text = _text(each)
        if text is None or hashlib.sha256(text).hexdigest() != digest:
            raise UserError(
                f"{name[:MOST]!r}, which belongs to the plan's model, has changed: its SHA-256 differs "
                "from the one in the plan"
            )
        texts[place_of(each)] = text
    if function not in _builders(texts.get(place_of(path), b"")):
        raise UserError(
            f"the plan's model is the function {function[:MOST]!r} of {file!r}, and only {FUNCTION!r}, "
            "functions annotated with '-> Model', and partials of these are executed"
        )
    return texts


def _builders(text: bytes) -> set[str]:
    """The names in a model file that build models, as its text says: a plan must not choose another one."""
    found = {FUNCTION}
    for node in _parsed(text).body:
        if isinstance(node, ast.FunctionDef) and _ends(node.returns, "Model"):
            found.add(node.name)
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        if _ends(node.value.func, "partial") and {*map(ast.unparse, node.value.args[:1])} & found:
            found.update(map(ast.unparse, node.targets))
    return found


def _ends(name: ast.expr | None, word: str) -> bool:
    """Whether a name, perhaps with its module's before it, is this word."""
    return name is not None and ast.unparse(name).rpartition(".")[2] == word


def _parsed(text: bytes) -> ast.Module:
    """The syntax of a file; without statements if it is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def closure(path: Path) -> list[Path]:
    """A model file and all local files that it imports, directly or not; nothing is run."""
    folders = search_folders(path)[1]
    found: dict[Path, None] = {}
    waiting = [path, *(_packages(path) if path.suffix == ".py" else ())]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += [each for each in _imported(file, folders) if not _is_installed(each)]
    return list(found)


def _imported(file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    """Local files that a file's text imports."""
    if file.suffix != ".py":
        return
    for node in ast.walk(_parsed(_text(file) or b"")):
        if isinstance(node, ast.Import):
            for alias in node.names:
                for folder in folders:
                    yield from _modules(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            named = node.module.split(".") if node.module else []
            above = [file.parent, *file.parent.parents]
            bases = above[node.level - 1 : node.level] if node.level else folders
            for alias in node.names:
                for base in bases:
                    yield from _modules(base, [*named, alias.name])


def _modules(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """The files of a module and of the packages around it, as far as there are any below a folder."""
    for name in names:
        for file in (folder / name / "__init__.py", folder / f"{name}.py"):
            if file.is_file():
                yield file
        folder = folder / name


def _packages(path: Path) -> Iterator[Path]:
    """The `__init__` files of the packages that a model file is in, which run before it."""
    folder = path.parent
    while (init := folder / "__init__.py").is_file():
        yield init
        folder = folder.parent


def loaded_files(before: Iterable[str]) -> tuple[Path, ...]:
    """Files of the modules that were imported since; `before`: names of those that were there."""
    known = set(before)
    new = [module for name, module in list(sys.modules.items()) if name not in known]
    files = [getattr(module, "__file__", None) for module in new]
    return tuple(Path(file) for file in files if isinstance(file, str))


def local_folders(path: Path) -> tuple[Path, ...]:
    """The folders below which files are local to a model file."""
    return (*search_folders(path)[1], Path.cwd())


def is_local(file: Path, folders: Iterable[Path]) -> bool:
    """True if a file is below one of these folders, and nothing installed."""
    places = Path(os.path.abspath(file)), place_of(file)
    below = any(place.is_relative_to(folder) for place in places for folder in folders)
    return below and not any(map(_is_installed, places))


def place_of(file: Path) -> Path:
    """The real path of a file under any of its names; a link is a file of its own."""
    return Path(os.path.realpath(file.parent), file.name)


def _is_installed(file: Path) -> bool:
    return any(file.is_relative_to(folder) for folder in _installed())


@cache
def _installed() -> tuple[Path, ...]:
    """Folders of the standard library, of installed packages and of this project: nobody's model."""
    paths = sysconfig.get_paths()
    ours = Path(__file__).resolve().parents[2]
    packages = [ours / name for name in ("layoutopt", "costmodels", "mesh_tf_core", "reports")]
    found = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    found.append(site.getusersitepackages())
    return (*packages, *map(Path, found))


def _shown(file: Path, model: Path) -> str:
    return Path(os.path.relpath(file, model.parent)).as_posix()


def _text(file: Path) -> bytes | None:
    """All of a file; None if it is not a file, or one that cannot be read."""
    try:
        return read_file(file) if os.path.isfile(file) else None
    except OSError:
        return None
