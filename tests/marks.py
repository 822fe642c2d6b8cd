"""Which cases of a long list `make test` runs; the others carry the marker `nightly`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_day(cases: Iterable[Any], every: int = 2, first: int = 0) -> list[Any]:
    """All cases: those at places `first`, `first + every`, … run by day, the others by night.

    A case that is a tuple is the values of several parameters.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if place % every == first else pytest.mark.nightly,
        )
        for place, case in enumerate(cases)
    ]
