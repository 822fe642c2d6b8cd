"""Checkpoints that no layout is part of: whole variables, checked by checksums, written atomically.

    step-000000100/
      00000.npy ...     one whole variable each
      manifest.json     step, extra state; shape, dtype and SHA-256 of every file, and of the manifest itself

A checkpoint is written under a temporary name and renamed when all of it is on the disk. Variables are
written one after the other, so the host needs room for one of them, not for all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mesh_tf_core.errors import UserError, known_names

FORMAT = "layoutopt-checkpoint/2"
MANIFEST = "manifest.json"
CHUNK = 1 << 22


class CheckpointWarning(UserWarning):
    """A checkpoint is torn or edited, and an older one is used."""


@dataclass(frozen=True)
class Entry:
    """A variable's file."""

    file: str
    sha256: str
    dtype: str
    shape: tuple[int, ...]


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
        array = np.load(self.path / entry.file, allow_pickle=False)
        if entry.dtype != "bfloat16":
            return array
        import ml_dtypes

        return array.view(ml_dtypes.bfloat16)


# -- writing -------------------------------------------------------------------------------------------------


def check_directory(directory: str | Path) -> None:
    """Raises UserError unless checkpoints can be written there; makes the directory."""
    root = Path(directory)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error) from None
    if not os.access(root, os.W_OK):
        raise UserError(f"checkpoint {str(directory)!r} cannot be written: permission denied")


def unwritable(directory: str | Path, error: OSError) -> UserError:
    """What the system said, as the user's error."""
    return UserError(
        f"checkpoint {str(directory)!r} cannot be written: {error.strerror or error}; "
        "give a directory with room"
    )


def write(
    directory: str | Path, step: int, variables: Mapping[str, Any], extra: Mapping[str, Any], keep: int = 3
) -> Path:
    """Writes `step-N` and removes all but the newest `keep`.

    Args:
      variables: name -> whole array; every one is asked for once, in order, and forgotten once it is written.
      extra: plain data (what JSON holds).
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".step-*"):  # by a process that was ended while it wrote
        shutil.rmtree(left, ignore_errors=True)
    final, temporary = root / f"step-{step:09d}", root / f".step-{step:09d}.{os.getpid()}"
    temporary.mkdir()
    files = {
        name: _write_array(temporary / f"{number:05d}.npy", variables[name])
        for number, name in enumerate(variables)
    }
    manifest = {"format": FORMAT, "step": step, "variables": files, "extra": dict(extra)}
    _write_manifest(temporary, json.loads(json.dumps(manifest)))
    _sync(temporary)
    if final.exists():
        final.rename(root / f".step-{step:09d}.replaced")
    temporary.rename(final)
    _sync(root)
    others = sorted(p for p in root.glob("step-*") if p != final)
    for old in [*root.glob(".step-*"), *others[: max(0, len(others) - (keep - 1))]]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write_array(path: Path, array: Any) -> dict[str, Any]:
    """The variable's entry in the manifest."""
    array = np.asarray(array, order="C")
    dtype = str(array.dtype)
    with path.open("wb") as file:
        hashing = _Hashing(file)
        plain = array.view(np.uint16) if dtype == "bfloat16" else array
        np.lib.format.write_array(hashing, plain, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "sha256": hashing.hexdigest(), "dtype": dtype, "shape": list(array.shape)}


class _Hashing:
    """A file that hashes what is written; NumPy writes an array to it in parts, without a copy of all."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self._digest = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        return self.file.write(content)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**manifest, "sha256": _own_digest(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _own_digest(manifest: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Puts a folder's names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading -------------------------------------------------------------------------------------------------


def newest(directory: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint, every file checked; torn or edited ones are named in `skipped`.

    None if there is no checkpoint at all.

    Raises:
      UserError: there are checkpoints, and none is whole.
    """
    skipped: list[str] = []
    for path in sorted(Path(directory).glob("step-*"), reverse=True):
        try:
            return _checked(path, tuple(skipped))
        except (OSError, ValueError, KeyError, TypeError) as error:
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
    return f"lacks {error}" if isinstance(error, KeyError) else str(error)


def _checked(path: Path, skipped: tuple[str, ...]) -> Checkpoint:
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']!r} instead of {FORMAT!r}")
    if manifest["sha256"] != _own_digest(manifest):
        raise ValueError(f"{MANIFEST} differs from its checksum")
    entries = {}
    for name, e in manifest["variables"].items():
        entries[name] = Entry(e["file"], e["sha256"], e["dtype"], tuple(e["shape"]))
        if _digest(path / e["file"]) != e["sha256"]:
            raise ValueError(f"variable {name!r} differs from its checksum")
    return Checkpoint(path, int(manifest["step"]), entries, manifest["extra"], skipped)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while content := file.read(CHUNK):
            digest.update(content)
    return digest.hexdigest()
