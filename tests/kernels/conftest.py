"""Devices for all tests of the process: the first use of TensorFlow fixes them."""

from __future__ import annotations

import pytest

from mesh_tf_core.engines import prepare


@pytest.fixture(scope="session", autouse=True)
def devices():
    return prepare(8)
