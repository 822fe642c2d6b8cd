"""Where calibrated profiles are kept between runs: the user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def profiles_directory() -> Path:
    """`layoutopt/profiles` below `$XDG_CACHE_HOME` or `~/.cache` (XDG Base Directory Specification)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "layoutopt" / "profiles"
