"""The objective of a search."""

from __future__ import annotations

from enum import StrEnum


class Objective(StrEnum):
    """The objective to minimise."""

    TIME = "time"
    """Seconds of a step that fits."""
    MEMORY = "memory"
    """The peak of a device."""
    PARETO = "pareto"
    """Seconds, for every peak."""
