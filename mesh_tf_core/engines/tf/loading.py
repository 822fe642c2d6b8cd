"""TensorFlow without libraries that it loads unasked and no engine uses: two thirds of its start.

Its last lines load Keras's optimizers (with pandas and matplotlib), for saved models that use them; its
converter for phones loads JAX, and its old Keras h5py. It continues without them; a later import gets them.
"""

import importlib.util
import sys
from functools import cache
from typing import Any

from mesh_tf_core.errors import not_installed

UNASKED = ("keras", "jax", "h5py")


@cache
def installed() -> bool:
    """True if TensorFlow is there; loads nothing."""
    return importlib.util.find_spec("tensorflow") is not None


def require() -> None:
    """UserError unless TensorFlow is installed; loads nothing."""
    if not installed():
        raise not_installed("TensorFlow", "tensorflow", "the engine 'local'")


def tensorflow() -> Any:
    """The module; the loaded one, if there is one. UserError where it is not installed."""
    require()
    if "tensorflow" not in sys.modules:
        absent = [name for name in UNASKED if name not in sys.modules]
        sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
        try:
            import tensorflow
        finally:
            for name in absent:
                del sys.modules[name]
    import tensorflow

    return tensorflow
