"""The phases of a training step."""

from enum import StrEnum


class Phase(StrEnum):
    """The part of a step that an operation belongs to; equal to its text, as plans and reports have it."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    """The update of variables."""
    RECOMPUTE = "recompute"
    """A second run of forward, for backward."""
