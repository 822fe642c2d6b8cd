"""Checkpoints that no layout is part of: whole variables, checked by checksums, written atomically.

    step-000000100/
      00000.npy ...     one whole variable each
      manifest.json     step, extra state; shape, dtype and SHA-256 of every file, and of the manifest itself

A checkpoint is written under a temporary name and renamed when all of it is on the disk. Variables are
written one after the other, so the host needs room for one of them, not for all. What else lies in the
directory is somebody else's: only names that are exactly ours are read, counted or removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.files import sync_names
from mesh_tf_core.ir.dtypes import check_dtype, itemsize
from mesh_tf_core.training import manifest as manifests
from mesh_tf_core.training.locking import locked
from mesh_tf_core.training.manifest import MANIFEST, Entry, Manifest

CHUNK = 1 << 22
HEADER = 1 << 16
"""Bytes before the elements in one of our arrays' files, at most."""
STEP = "([0-9]{9}|[1-9][0-9]{9,17})"
NAME = re.compile(f"step-{STEP}")
UNFINISHED = re.compile(rf"\.step-{STEP}\.[0-9a-f]{{1,16}}")
"""Left by a process that was ended while it wrote."""
REPLACED = re.compile(rf"\.step-{STEP}\.replaced")
"""The older one of the same step, for the moment between two renamings."""


class CheckpointWarning(UserWarning):
    """A checkpoint is torn or edited, and an older one is used."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files all agree with their checksums.

    Attributes:
      extra: what the trainer added (the data's position, the layout at the time).
      skipped: newer checkpoints that were passed over, and why.
    """

    path: Path
    step: int
    variables: Mapping[str, Entry]
    extra: Mapping[str, Any]
    skipped: tuple[str, ...] = ()

    def read(self, name: str) -> Any:
        """A whole variable."""
        if name not in self.variables:
            raise UserError(
                f"checkpoint {str(self.path)!r} has no variable {name!r}; {known_names(name, self.variables)}"
            )
        entry = self.variables[name]
        try:
            array = np.load(self.path / entry.file, allow_pickle=False)
        except (OSError, ValueError) as error:  # since it was checked
            raise UserError(
                f"checkpoint {str(self.path)!r}: variable {name!r} cannot be read: {_reason(error)}"
            ) from None
        if entry.dtype != "bfloat16":
            return array
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)


# -- the directory -------------------------------------------------------------------------------------------


def check_directory(directory: str | Path) -> None:
    """Raises UserError unless checkpoints can be written there; makes the directory, and the one around it,
    but none above."""
    if not str(directory):
        raise UserError("checkpoint '' names no directory; write for example build/run")
    root = Path(directory)
    try:
        for folder in (root.parent, root):
            if not folder.is_dir():
                folder.mkdir()
    except FileExistsError as error:
        raise UserError(
            f"checkpoint {str(directory)!r}: {str(error.filename)!r} is a file; name a directory"
        ) from None
    except FileNotFoundError:
        raise UserError(
            f"checkpoint {str(directory)!r} cannot be made: there is no folder "
            f"{str(root.parent.parent)!r}; make it, or name another place"
        ) from None
    except (OSError, ValueError) as error:
        raise unwritable(directory, error) from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise UserError(f"checkpoint {str(directory)!r} cannot be written: permission denied")


@contextlib.contextmanager
def owned(directory: str | Path) -> Iterator[str]:
    """Within it checkpoints can be written there, by this job alone. Yields why the directory cannot be
    locked, or nothing.

    Raises:
      UserError: it cannot be written, or another job writes there.
    """
    check_directory(directory)
    with contextlib.ExitStack() as stack:
        try:
            trouble = stack.enter_context(locked(directory))
        except OSError as error:
            raise unwritable(directory, error) from None
        yield trouble


def unwritable(directory: str | Path, error: Exception) -> UserError:
    """What the system said, as the user's error."""
    said = (error.strerror if isinstance(error, OSError) else None) or error
    left = listed(directory)
    kept = f"; {left[0][1].name} is still there" if left else ""
    return UserError(
        f"checkpoint {str(directory)!r} cannot be written: {said}; give a directory with room{kept}"
    )


def listed(directory: str | Path) -> list[tuple[int, Path]]:
    """Steps and paths of the checkpoints in a directory, the newest first, whole or not."""
    ours = {}
    for pattern in (REPLACED, NAME):  # the later one stands
        for path in _entries(Path(directory)):
            if found := pattern.fullmatch(path.name):
                ours[int(found[1])] = path
    return sorted(ours.items(), reverse=True)


def _entries(root: Path) -> list[Path]:
    """The directories in a directory; a link is somebody's own."""
    try:
        with os.scandir(root) as found:
            return [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
    except (OSError, ValueError):
        return []


def _tidy(root: Path) -> None:
    """Removes what ended processes left; what one had put aside gets its name again."""
    for path in _entries(root):
        if found := REPLACED.fullmatch(path.name):
            named = root / f"step-{found[1]}"
            if not named.exists():
                path.rename(named)
                continue
        if found or UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


# -- writing -------------------------------------------------------------------------------------------------


def write(
    directory: str | Path, step: int, variables: Mapping[str, Any], extra: Mapping[str, Any], keep: int = 3
) -> Path:
    """Writes `step-N` and removes all but the newest `keep`. Only one process may do so at a time
    (`locking`).

    Args:
      variables: name -> whole array; every one is asked for once, in order, and forgotten once it is written.
      extra: plain data (what JSON holds).

    Raises:
      OSError: it cannot be written; what was there is there, and nothing else.
    """
    root = Path(directory)
    root.mkdir(exist_ok=True)
    _tidy(root)
    final = root / f"step-{step:09d}"
    temporary = root / f".{final.name}.{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        files = {
            name: _write_array(temporary / f"{number:05d}.npy", variables[name])
            for number, name in enumerate(variables)
        }
        manifests.write(temporary / MANIFEST, Manifest(step=step, variables=files, extra=dict(extra)))
        sync_names(temporary)
        if final.exists():
            final.rename(root / f".{final.name}.replaced")
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_names(root)
    _tidy(root)
    others = [path for _, path in listed(root) if path != final]
    for old in others[max(0, keep - 1) :]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write_array(path: Path, array: Any) -> Entry:
    """The variable's entry in the manifest."""
    array = np.asarray(array, order="C")
    dtype = check_dtype(str(array.dtype))
    with path.open("wb") as file:
        hashing = _Hashing(file)
        plain = array.view(np.uint16) if dtype == "bfloat16" else array
        np.lib.format.write_array(hashing, plain, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return Entry(file=path.name, sha256=hashing.hexdigest(), dtype=dtype, shape=array.shape)


class _Hashing:
    """A file that hashes what is written; NumPy writes an array to it in parts, without a copy of all."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self._digest = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        return self.file.write(content)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


# -- reading -------------------------------------------------------------------------------------------------


def newest(directory: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint, every file checked; torn or edited ones are named in `skipped`.

    None if there is no checkpoint at all.

    Raises:
      UserError: there are checkpoints, and none is whole.
    """
    skipped: list[str] = []
    for step, path in listed(directory):
        try:
            return _checked(path, step, tuple(skipped))
        except (OSError, ValueError) as error:
            skipped.append(f"{path.name}: {_reason(error)}")
    if skipped:
        raise UserError(
            f"checkpoint {str(directory)!r}: no whole checkpoint in it ({'; '.join(skipped)}); "
            "give another directory, or remove this one to start anew"
        )
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name} cannot be read ({error.strerror})"
    return " ".join(str(error).split())


def _checked(path: Path, step: int, skipped: tuple[str, ...]) -> Checkpoint:
    manifest = manifests.read(path / MANIFEST)
    if manifest.step != step:
        raise ValueError(f"{MANIFEST} says step {manifest.step}")
    for name, entry in manifest.variables.items():
        _check_array(path / entry.file, name, entry)
    return Checkpoint(path, step, manifest.variables, manifest.extra, skipped)


def _check_array(path: Path, name: str, entry: Entry) -> None:
    """Raises unless the file holds what the manifest says, and nothing else: no array is made before."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path.name} is not a file")
    bytes = itemsize(entry.dtype)
    for size in entry.shape:
        bytes *= size
    said = f"variable {name[: manifests.LONGEST]!r}"
    if not bytes < found.st_size <= bytes + HEADER:
        raise ValueError(
            f"{said} is {entry.dtype}{list(entry.shape)} in {MANIFEST}, and {path.name} has "
            f"{found.st_size} bytes"
        )
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while content := file.read(CHUNK):
            digest.update(content)
        if digest.hexdigest() != entry.sha256:
            raise ValueError(f"{said} differs from its checksum")
        file.seek(0)
        shape, dtype = _header(file)
        begin = file.tell()
    wanted = np.dtype("uint16" if entry.dtype == "bfloat16" else entry.dtype)
    if (shape, dtype) != (entry.shape, wanted) or begin + bytes != found.st_size:
        raise ValueError(
            f"{said} is {entry.dtype}{list(entry.shape)} in {MANIFEST}, {dtype}{list(shape)} in {path.name}"
        )


def _header(file: BinaryIO) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array's file."""
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    except Exception as error:  # its parser raises many kinds
        raise ValueError(f"{Path(file.name).name} is no array: {type(error).__name__}") from None
    return shape, dtype
