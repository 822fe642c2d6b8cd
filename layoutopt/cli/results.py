"""Output that several commands have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_tf_core import Layout


def layout_text(layout: Layout) -> str:
    """A layout for people."""
    return str(layout) or "replicated (nothing is split)"
