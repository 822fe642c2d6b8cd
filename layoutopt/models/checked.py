"""Imports while a model runs that only a plan names: local files run from the checked text, or not at all.

Between the check of a file and its import, Python would read it again or load something else instead: a stale
.pyc of `__pycache__`, an extension module or a package of the same name, or a local file that hides an
installed module. From `only` to `leave` this finder therefore asks Python's own finders which file they would
load. Installed files are loaded by them. A local .py file that was checked is compiled from its text, and no
other local file is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from layoutopt.models.recorded import file_and_function, is_local, local_folders, place_of
from mesh_tf_core.errors import UserError
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
