"""What several commands print alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layoutopt.cli.options import Given
    from mesh_tf_core import Layout, Model, Options


def given_json(model: Model, given: Given) -> dict[str, Any]:
    """The fields of a result that say what was asked: model, mesh, layout, and options that are not plain."""
    from layoutopt.plan.build import axes_of, model_info

    return {
        "model": model_info(model),
        "mesh": given.mesh.as_dict(),
        "layout": axes_of(given.layout),
        **options_json(given.options, given.layout),
    }


def options_json(options: Options, layout: Layout) -> dict[str, Any]:
    """What is decided beside the plain rules of a layout, as a plan file says it; only what is not plain."""
    from layoutopt.plan.build import decided

    return decided(options, layout).model_dump(exclude_defaults=True)


def layout_text(layout: Layout) -> str:
    """A layout for people."""
    return str(layout) or "replicated (nothing is split)"
