"""Finds, proves, explains and applies the best layout of a model over a mesh of devices.

plan = layoutopt.search(model, devices=512, hardware="tpu-v3")
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than everything else here
if TYPE_CHECKING:
    from typing import Any

    from layoutopt.answers.explaining import explain
    from layoutopt.answers.pricing import cost, lint
    from layoutopt.answers.running import validate, verify
    from layoutopt.api import Limits, search
    from layoutopt.importers.huggingface import from_huggingface
    from layoutopt.importers.jax.model import from_jax
    from layoutopt.plan.build import Plan, load_plan
    from layoutopt.replicas import choose_replicas
    from layoutopt.sizing.sizing import size
    from layoutopt.space.decisions import SearchSpace

    __version__: str

__all__ = [
    "Limits",
    "Plan",
    "SearchSpace",
    "choose_replicas",
    "cost",
    "explain",
    "from_huggingface",
    "from_jax",
    "lint",
    "load_plan",
    "search",
    "size",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is first used, so that the import stays light."""
    import importlib

    homes = {
        **dict.fromkeys(("Limits", "search"), "layoutopt.api"),
        "SearchSpace": "layoutopt.space.decisions",
        "choose_replicas": "layoutopt.replicas",
        "explain": "layoutopt.answers.explaining",
        **dict.fromkeys(("cost", "lint"), "layoutopt.answers.pricing"),
        **dict.fromkeys(("validate", "verify"), "layoutopt.answers.running"),
        "from_huggingface": "layoutopt.importers.huggingface",
        "from_jax": "layoutopt.importers.jax.model",
        "size": "layoutopt.sizing.sizing",
        "Plan": "layoutopt.plan.build",
        "load_plan": "layoutopt.plan.build",
    }
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("layoutopt")
    elif name in homes:
        from layoutopt.arguments import from_python

        found = getattr(importlib.import_module(homes[name]), name)
        found = found if isinstance(found, type) else from_python(found)
    else:
        from mesh_tf_core.lazy import no_attribute

        raise no_attribute(__name__, name, __all__)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
