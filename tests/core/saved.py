"""Arrays as checkpoints take them, a checkpoint in the format before today's, damage to files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mesh_tf_core.engines.pieces import VariablePiece
from mesh_tf_core.training import manifest

VALUES: dict[str, Any] = {
    "w": np.arange(12.0).reshape(3, 4).T,
    "step": np.array(7, np.int32),
    "b": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "none": np.zeros((0, 3), np.float32),
}


def piece(name: str, dtype: str, shape: tuple[int, ...]) -> VariablePiece:
    return VariablePiece(name, dtype, shape, (0,) * len(shape), shape)


def whole(arrays: Mapping[str, Any]) -> dict[VariablePiece, Any]:
    return {piece(name, str(array.dtype), array.shape): array for name, array in arrays.items()}


def write_before(directory: Path, step: int, arrays: Mapping[str, Any], extra: Mapping[str, Any]) -> Path:
    """As layoutopt-checkpoint/2 was written: each variable in a .npy file."""
    folder = directory / f"step-{step:09d}"
    folder.mkdir(parents=True)
    entries = {}
    for number, (name, array) in enumerate(arrays.items()):
        dtype, path = str(array.dtype), folder / f"{number:05d}.npy"
        plain = np.asarray(array, order="C")
        np.save(path, plain.view(np.uint16) if dtype == "bfloat16" else plain)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        entries[name] = {"file": path.name, "sha256": found, "dtype": dtype, "shape": list(array.shape)}
    content = {"format": "layoutopt-checkpoint/2", "step": step, "variables": entries, "extra": dict(extra)}
    (folder / manifest.MANIFEST).write_text(json.dumps({**content, "sha256": manifest._digest(content)}))
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
