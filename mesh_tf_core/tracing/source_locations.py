"""The source location of an operation in the model's own code."""

from __future__ import annotations

import sys
from pathlib import Path

MOST = 16
"""Frames that are looked through: an operation of a layer is a few calls below the model's line."""
_ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{_ROOT / name}/" for name in ("mesh_tf_core", "costmodels", "layoutopt"))


def caller() -> str:
    """'file:line' of the nearest caller outside of these packages; '' if none is near."""
    frame = sys._getframe(1)
    for _ in range(MOST):
        file = frame.f_code.co_filename
        if not file.startswith(OURS):
            return f"{file}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
