"""The hardware files of the package."""

from functools import cache
from pathlib import Path

PRESETS = Path(__file__).parent / "hardware" / "data"


@cache
def hardware_names() -> tuple[str, ...]:
    """The names of the hardware presets, sorted.

    Example:
      >>> import costmodels
      >>> "tpu-v5p" in costmodels.hardware_names()
      True
    """
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))
