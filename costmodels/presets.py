"""The hardware files of the package."""

from __future__ import annotations

from pathlib import Path

PRESETS = Path(__file__).parent / "hardware" / "data"


def hardware_names() -> tuple[str, ...]:
    """The names of the hardware presets, sorted.

    Example:
      >>> import costmodels
      >>> "tpu-v5p" in costmodels.hardware_names()
      True
    """
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))
