"""Finds, proves, explains and applies the best layout of a model over a mesh of devices.

plan = layoutopt.search(model, devices=512, hardware="tpu-v3")
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than everything else here
if TYPE_CHECKING:
    from typing import Any

    from layoutopt.api import (
        Limits,
        Plan,
        SearchSpace,
        candidates,
        choose_replicas,
        cost,
        explain,
        from_huggingface,
        from_jax,
        from_torch,
        learn,
        lint,
        load_plan,
        search,
        size,
        validate,
        verify,
    )

    __version__: str

__all__ = [
    "Limits",
    "Plan",
    "SearchSpace",
    "candidates",
    "choose_replicas",
    "cost",
    "explain",
    "from_huggingface",
    "from_jax",
    "from_torch",
    "learn",
    "lint",
    "load_plan",
    "search",
    "size",
    "validate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is first used, so that the import stays light."""
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("layoutopt")
    elif name in __all__:
        import importlib

        from layoutopt.space.keywords import from_python

        found = getattr(importlib.import_module("layoutopt.api"), name)
        found = found if isinstance(found, type) else from_python(found)
    else:
        from mesh_tf_core.lazy import no_attribute

        raise no_attribute(__name__, name, __all__)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
