"""The JSON objects that several commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_tf_core import Layout, Model, Options


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


def options_json(options: Options) -> dict[str, Any]:
    """What is decided besides the layout, as a plan file says it; only what is not plain."""
    from mesh_tf_core.lower.storage import STAGES

    found = {
        "storage": {name: STAGES[stage] for name, stage in sorted(options.storage.items()) if stage},
        "recompute": sorted(options.recompute),
        "microbatches": options.microbatches if options.microbatches > 1 else None,
    }
    return {name: value for name, value in found.items() if value}


def words(value: Any) -> str:
    """A JSON value without its punctuation."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {words(item)}" for name, item in value.items())
    return ", ".join(words(item) for item in value) if isinstance(value, list) else str(value)


def layout_text(layout: Layout) -> str:
    """A layout for people."""
    return str(layout) or "replicated (nothing is split)"
