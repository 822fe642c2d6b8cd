"""The Python module of a model: a file, which may import its neighbours, or an installed module.

Imports while a model runs that only a plan names: local files run from the checked text, or not at all.

Between the check of a file and its import, Python would read it again or load something else instead: a stale
.pyc of `__pycache__`, an extension module or a package of the same name, or a local file that hides an
installed module. From `only` to `leave` this finder therefore asks Python's own finders which file they would
load. Installed files are loaded by them. A local .py file that was checked is compiled from its text, and no
other local file is loaded.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from layoutopt.models.recorded import (
    FUNCTION,
    MOST,
    file_and_function,
    is_local,
    local_folders,
    place_of,
    search_folders,
)
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.reading import read_file, reading


class _FromText(SourceFileLoader):
    """Loads a module from its text; no .pyc is read or written."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._text, self.path)
        return code


class _Checked(MetaPathFinder):
    """Finds what other finders find, if it may run."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.texts: dict[Path, bytes] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.origin is None or not spec.has_location:
            return spec
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = self.loader(fullname, spec.origin) or spec.loader
        if not isinstance(spec.loader, _FromText) and is_local(Path(spec.origin), self.folders):
            raise UserError(
                f"importing {fullname!r} would run {spec.origin!r}, whose hash the plan does not record; "
                "only files whose hash matches the plan are executed, so give the model yourself with "
                "--model MODEL"
            )
        return spec

    def loader(self, name: str, path: str) -> _FromText | None:
        """Loads a file that was checked; None for another one."""
        text = self.texts.get(place_of(Path(path)))
        return None if text is None else _FromText(name, path, text)


_checked = _Checked()


def only(source: str, texts: Mapping[Path, bytes]) -> None:
    """Restricts imports: of the files local to this model file (and to earlier ones), only these may run.

    Args:
      source: the model; texts: the result of `recorded.trusted` for it.
    """
    named = file_and_function(source)
    assert named is not None
    if _checked not in sys.meta_path:
        leave()
        sys.meta_path.insert(0, _checked)
    _checked.texts.update(texts)
    _checked.folders += local_folders(named[0].resolve())


def leave() -> None:
    """Ends the restriction of `only`, because a user names the files that run."""
    if _checked in sys.meta_path:
        sys.meta_path.remove(_checked)
    _checked.folders, _checked.texts = [], {}


def loader_of(name: str, path: Path, shown: str) -> SourceFileLoader:
    """The loader of a model file from the text that was checked, or of a file that a user names."""
    if _checked in sys.meta_path and (known := _checked.loader(name, str(path))) is not None:
        return known
    with reading(f"model file {shown}", "give a readable .py file"):
        return _FromText(name, str(path), read_file(path))


PLANS = "to use a plan, pass it with --layout, e.g. layoutopt train MODEL --layout PLAN.json"
_MODULE = re.compile(r"(?P<module>[A-Za-z_][\w.]*)(?::(?P<function>[^:/]*))?")
TORCH = "return layoutopt.from_torch(module, batch), or give the model's Hugging Face config.json instead"
RECIPES = {".toml", ".yaml", ".yml"}
"""Suffixes of training recipes of other tools."""
EXTRAS = {"jax": "jax", "optax": "jax", "tensorflow": "tensorflow", "torch": "torch"}
"""Optional packages, by the extra that brings them."""


def function_of(source: str) -> tuple[ModuleType, str, Callable[..., Any]]:
    """The module that `source` names, and the function in it that builds a model."""
    module, name = _import(source)
    function = getattr(module, name, None)
    if callable(function):
        return module, name, at_once(function, source)
    known = [n for n, f in vars(module).items() if _is_own(f, module)]
    what = "no function" if function is None else f"a {type(function).__name__}, not a function,"
    raise UserError(f"{source} has {what} {name!r} to build a model; {known_names(name, known)}")


def at_once(function: Callable[..., Any], source: str) -> Callable[..., Any]:
    """The function of a file; UserError if it is a coroutine, which only an event loop calls."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        name = getattr(function, "__name__", "function")
        raise UserError(f"{source}: {name}() is asynchronous; write def {name}(...) instead of async def")
    return function


def _is_own(value: object, module: ModuleType) -> bool:
    """Whether a module defines this function, or this one with some arguments given."""
    while isinstance(value, functools.partial):
        value = value.func
    return inspect.isfunction(value) and value.__module__ == module.__name__


def typed(value: object) -> str:
    """Describes a wrong return value of a function."""
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def is_torch(value: object) -> bool:
    """True if a class of PyTorch made a value."""
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(value).__mro__)


def _import(source: str) -> tuple[ModuleType, str]:
    """The module that `source` names, and the name of the function in it."""
    if (named := file_and_function(source)) is not None:
        path, function = named
        if not os.path.exists(path):
            kind = f"*{path.suffix}"
            if os.path.islink(path):
                raise UserError(
                    f"model file {str(path)[:MOST]!r} is a broken symbolic link; point the link at an "
                    "existing file"
                )
            found = [p.name for p in path.parent.glob(kind)] if os.path.isdir(path.parent) else []
            known = known_names(path.name, found) if found else f"give the path of a {path.suffix} file"
            plan = f"; {PLANS}" if path.suffix == ".json" else ""
            raise UserError(f"model file {str(path)[:MOST]!r} does not exist; {known}{plan}")
        if path.suffix == ".json":
            from layoutopt.importers.huggingface import module_of

            return module_of(path, str(path)), function
        return _import_file(path.resolve(), str(path)), function
    if (path := Path(os.path.expanduser(source))).suffix in RECIPES or path.is_file():
        recipe = (
            "; layoutopt cannot read recipes of other tools, but docs/guides/coming_from.md maps their "
            "settings to options"
        )
        raise UserError(
            f"model {source[:MOST]!r}: give FILE.py or a Hugging Face CONFIG.json, not a file with the "
            f"suffix {path.suffix!r}{recipe if path.suffix in RECIPES else ''}"
        )
    if match := _MODULE.fullmatch(source):
        _search_path(Path.cwd())
        name = match["module"]
        with user_errors(f"module {name}", None):
            try:
                return importlib.import_module(name), match["function"] or FUNCTION
            except ModuleNotFoundError as error:
                if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                    raise UserError(
                        f"model {source!r}: Python finds no module {error.name!r}; give a file "
                        "(path/to/model.py) or an installed module (package.module:function)"
                    ) from None
                raise
    raise UserError(
        f"model {source[:MOST]!r} is not in a known form; give FILE.py, FILE.py:FUNCTION, "
        "PACKAGE.MODULE:FUNCTION or CONFIG.json"
    )


def _import_file(path: Path, shown: str) -> ModuleType:
    """Runs a file as a module; one in a package by its full name, so that its relative imports work."""
    name, folders = search_folders(path)
    for folder in reversed(folders):
        _search_path(folder)
    with user_errors(f"model file {shown}", None, path):
        if not _is_ours(name, path):
            name = f"_model_{sha256(str(path).encode()).hexdigest()[:12]}"
        spec = importlib.util.spec_from_file_location(name, path, loader=loader_of(name, path, shown))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


def _is_ours(name: str, path: Path) -> bool:
    """Whether the package part of `name` is the folder of `path`, not another package of that name."""
    package, _, _ = name.rpartition(".")
    return bool(package) and str(path.parent) in list(importlib.import_module(package).__path__)


def _search_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


class _Aside:
    """Within it, what the user's code prints goes to stderr, until the last of several threads has left."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._streams = sys.stdout, sys.stderr

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._streams = sys.stdout, sys.stderr
                sys.stdout = sys.stderr
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            own, aside = self._streams
            if not self._inside and sys.stdout is aside:
                sys.stdout = own


_aside = _Aside()


@contextlib.contextmanager
def user_errors(what: str, module: ModuleType | None, path: Path | None = None) -> Iterator[None]:
    """Turns every exception of the user's code into one line; prints of the code go to stderr."""
    file = str(path or getattr(module, "__file__", None) or "")
    try:
        with _aside:
            yield
    except UserError as error:
        line = _line(error, file)
        raise type(error)(f"{what}{line}: {error}" if line else str(error)) from error
    except SyntaxError as error:
        of = f"{error.filename} " if error.filename not in (None, file) else ""
        where = f", {of}line {error.lineno}" if error.lineno else ""
        raise UserError(f"{what}{where}: {type(error).__name__}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        said = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise UserError(f"{what}{_line(error, file)} raised {said}{_meant(error)}") from error


def _meant(error: BaseException) -> str:
    """'; did you mean NAME?' where a module lacks a name that is near one of its own, which Python asks in
    tracebacks alone; how to install an optional package."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f": pip install 'layoutopt[{EXTRAS[error.name]}]'"
    if not (isinstance(error, AttributeError) and isinstance(error.obj, ModuleType)):
        return ""
    near = difflib.get_close_matches(error.name or "", dir(error.obj), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _line(error: BaseException, file: str) -> str:
    """', line N' of the deepest frame in the user's file; of another file, its name as well."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f.lineno for f in frames if f.filename == file]
    if own:
        return f", line {own[-1]}"
    outside = [f for f in frames if "importlib" not in f.filename and f.filename != contextlib.__file__]
    return (
        f", {outside[-1].filename} line {outside[-1].lineno}"
        if outside and not isinstance(error, UserError)
        else ""
    )
