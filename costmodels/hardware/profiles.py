"""The user's cache directory, kept between runs: calibrated profiles, compiled steps."""

import os
from pathlib import Path

from mesh_tf_core.errors import UserError


def profiles_directory() -> Path | None:
    """The directory of calibrated profiles; None for a user without a home."""
    return cache_directory("profiles")


def cache_directory(name: str) -> Path | None:
    """`layoutopt/NAME` below `$XDG_CACHE_HOME` or `~/.cache` (XDG Base Directory Specification); None for
    a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The specification has relative paths ignored.
        base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "layoutopt" / name


def made_profiles_directory() -> Path:
    """The same, made if it is missing; UserError where it cannot be."""
    place = profiles_directory()
    if place is None:
        raise UserError(
            "the profile cannot be stored, because there is no home directory; give a file with --out"
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the profile folder {str(place)!r} cannot be created: {error.strerror}; give a file with "
            "--out, or set XDG_CACHE_HOME to another folder"
        ) from None
    return place
