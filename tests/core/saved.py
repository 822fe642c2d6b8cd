"""Arrays as checkpoints take them, and damage to files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mesh_tf_core.engines.pieces import VariablePiece

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


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
