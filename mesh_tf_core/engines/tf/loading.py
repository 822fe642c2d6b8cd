"""TensorFlow without Keras, which it loads unasked with pandas and matplotlib: that was half of its start.

`tf.keras` loads it where it is used, as ever.
"""

from __future__ import annotations

import sys
from typing import Any


def tensorflow() -> Any:
    """The module; as it is, if it was loaded before."""
    if "tensorflow" in sys.modules or "keras" in sys.modules:
        import tensorflow

        return tensorflow
    # Its last lines load Keras's optimizers, for saved models that know them, or go on without Keras.
    sys.modules["keras"] = None  # type: ignore[assignment]
    try:
        import tensorflow
    finally:
        del sys.modules["keras"]
    return tensorflow
