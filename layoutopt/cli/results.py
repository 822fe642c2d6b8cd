"""The JSON objects that several commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_tf_core import Layout, Model


def model_json(model: Model) -> dict[str, Any]:
    """Which model: name, fingerprint of its step, hyperparameters, number of trained parameters."""
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "hparams": dict(model.hparams),
        "parameters": model.parameters,
    }


def layout_json(layout: Layout) -> dict[str, list[str]]:
    """Dimension -> mesh axes."""
    return {name: list(axes) for name, axes in layout.items()}


def layout_text(layout: Layout) -> str:
    """A layout for people."""
    return str(layout) or "replicated (nothing is split)"
