"""How planted faults are looked for: the conformance helper must find them."""

from __future__ import annotations

import re

import pytest

from tests.conformance.helper import conform
from tests.conformance.samples import SAMPLES

BY_NAME = {s.name: s for s in SAMPLES}
CAUGHT = (AssertionError, ValueError, IndexError)


def caught(*names: str, match: str = "", mesh: str = "x:2;y:2") -> None:
    """Each sample must be found faulty."""
    for name in names:
        with pytest.raises(CAUGHT) as found:
            conform(BY_NAME[name], mesh, "float64")
        assert re.search(match, str(found.value)), f"{name}: {found.value}"
