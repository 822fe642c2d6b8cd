"""Python's cyclic garbage collector, held off where many objects and no garbage are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """No collections inside: going through all that lives takes a tenth of tracing, a fifth of pricing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
