"""Python's cyclic garbage collector, held off where many objects and little garbage are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 2_000_000
"""Objects that may be made before they are looked through once."""
_made = 0


@contextmanager
def kept() -> Iterator[None]:
    """No collections inside: going through all that lives takes a tenth of tracing, a fifth of pricing.

    What was made counts as old afterwards, and is looked through when there is much of it.
    """
    global _made
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            _made += gc.get_count()[0]
            if _made > MANY:
                _made = 0
                gc.collect()
            elif not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
