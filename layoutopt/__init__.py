"""Finds, proves, explains and applies the best layout of a model over a mesh of devices.

plan = layoutopt.search(model, devices=512, hardware="tpu-v3")
"""

from __future__ import annotations

from layoutopt import api

TYPE_CHECKING = False  # typing's own takes longer to import than everything else here
if TYPE_CHECKING:
    from typing import Any

    from layoutopt.api import *  # noqa: F403

    __version__: str

__all__ = list(api.__all__)
__all__.remove("AUTO")


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
