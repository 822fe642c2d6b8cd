"""What several commands print alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layoutopt.cli.given import Given
    from mesh_tf_core import Layout, Model


def given_json(model: Model, given: Given) -> dict[str, Any]:
    """The fields of a result that say what was asked: model, mesh, layout, and options that are not plain."""
    from layoutopt.plan.build import axes_of, decided, model_info

    pipeline = model.stages(given.mesh, given.layout)
    return {
        "model": model_info(model),
        "mesh": given.mesh.as_dict(),
        "layout": axes_of(given.layout),
        **decided(given.options, given.layout, pipeline).model_dump(exclude_defaults=True),
    }


def layout_text(layout: Layout) -> str:
    """A layout for people."""
    return str(layout) or "replicated (nothing is split)"
