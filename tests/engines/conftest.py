"""Eight virtual CPU devices for every engine test of the process."""

from __future__ import annotations

import pytest

from mesh_tf_core.engines import prepare


@pytest.fixture(scope="session", autouse=True)
def devices():
    return prepare(8)
