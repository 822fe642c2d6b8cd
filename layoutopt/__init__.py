"""Finds, proves, explains and applies the best layout of a model over a mesh of devices.

plan = layoutopt.search(model, devices=512, hardware="tpu-v3")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model
from mesh_tf_core.training.auto import provide

if TYPE_CHECKING:
    from layoutopt.api import search
    from layoutopt.plan.build import Plan, load_plan

__all__ = ["Plan", "load_plan", "search"]


class _Auto:
    """The search of `mtf.Trainer(model, mesh, layout="auto")`."""

    def best(self, model: Model, mesh: Mesh) -> Mapping[str, Any]:
        from layoutopt.api import search

        return search(model, mesh=mesh).to_json()

    def read(self, plan: Mapping[str, Any]) -> Plan:
        from layoutopt.plan.build import parse_plan

        return parse_plan(plan, "of the search")


provide(_Auto())


def __getattr__(name: str) -> Any:
    """Loads the search and its plans when they are first used, so that the import stays light."""
    import importlib

    homes = {"search": "layoutopt.api", "Plan": "layoutopt.plan.build", "load_plan": "layoutopt.plan.build"}
    if name not in homes:
        raise AttributeError(f"module 'layoutopt' has no attribute {name!r}")
    found = getattr(importlib.import_module(homes[name]), name)
    globals()[name] = found
    return found
