"""Checkpoints that no layout is part of: whole variables, checked by checksums, written atomically.

A checkpoint is a directory `step-N` with one .npy file per variable and a `manifest.json` (format, step,
extra state, SHA-256 and shape of every file). It is written under a temporary name and renamed when it is
complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError

FORMAT = "layoutopt-checkpoint/1"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint held.

    Attributes:
      arrays: variable name -> whole array (bfloat16 as its uint16 bits, see `dtypes`).
      extra: whatever the trainer added (data position, losses).
    """

    step: int
    arrays: Mapping[str, Any]
    extra: Mapping[str, Any]
    skipped: tuple[str, ...] = ()


def save(
    directory: str | Path,
    step: int,
    read: Callable[[str], Any],
    names: list[str],
    extra: Mapping[str, Any],
    keep: int = 3,
) -> Path:
    """Writes `step-N` and removes all but the newest `keep`.

    Args:
      read: name -> whole array.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    final, temporary = root / f"step-{step:09d}", root / f".step-{step:09d}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    files = {}
    for number, name in enumerate(names):
        array = np.asarray(read(name))
        dtype = str(array.dtype)
        buffer = io.BytesIO()
        np.save(buffer, array.view(np.uint16) if dtype == "bfloat16" else array, allow_pickle=False)
        content = buffer.getvalue()
        file = f"{number:05d}.npy"
        _write(temporary / file, content)
        files[name] = {
            "file": file,
            "sha256": hashlib.sha256(content).hexdigest(),
            "dtype": dtype,
            "shape": list(array.shape),
        }
    manifest = {"format": FORMAT, "step": step, "variables": files, "extra": dict(extra)}
    _write(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    for old in sorted(root.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def restore(directory: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint; torn or edited ones are passed over and named in `skipped`. None if there
    is none."""
    skipped: list[str] = []
    found = sorted(Path(directory).glob("step-*"), reverse=True)
    for path in found:
        try:
            loaded = _load(path)
        except (OSError, ValueError, KeyError) as error:
            skipped.append(f"{path.name}: {error}")
            continue
        return Checkpoint(loaded.step, loaded.arrays, loaded.extra, tuple(skipped))
    if skipped:
        raise UserError(f"checkpoint {str(directory)!r}: no whole checkpoint in it ({'; '.join(skipped)})")
    return None


def _load(path: Path) -> Checkpoint:
    manifest = json.loads((path / "manifest.json").read_text())
    if manifest.get("format") != FORMAT:
        raise ValueError(f"format {manifest.get('format')!r} instead of {FORMAT!r}")
    arrays = {}
    for name, entry in manifest["variables"].items():
        content = (path / entry["file"]).read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ValueError(f"variable {name!r} differs from its checksum")
        array = np.load(io.BytesIO(content), allow_pickle=False)
        if entry["dtype"] == "bfloat16":
            import ml_dtypes

            array = array.view(ml_dtypes.bfloat16)
        arrays[name] = array
    return Checkpoint(int(manifest["step"]), arrays, manifest["extra"])
