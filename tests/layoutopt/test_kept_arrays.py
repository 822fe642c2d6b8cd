"""Storage of arrays that stay between steps, trained or not, is searched."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from tests.kept_arrays import KINDS, model
from tests.layoutopt.test_tables import compare


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_rows(kind: str, parts: int) -> None:
    stages = ("layout", "zero1", "zero3", "zero3@data")
    asked = {"storage": stages, "recompute": (False, True), "offload": ("weights",)}
    compare(
        model(kind, "float32"), mtf.Mesh("data:2;model:2"), parts, load_hardware("tpu-v4"), 1, 12, **asked
    )
