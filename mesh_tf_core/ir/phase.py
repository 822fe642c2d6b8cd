"""The phases of a training step."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What an operation is part of; equal to its text, as plans and reports have it."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    """Of variables."""
    RECOMPUTE = "recompute"
    """A second run of forward, for backward."""
