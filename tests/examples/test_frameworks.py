"""Models of other libraries: a file of examples/frameworks is a MODEL, where its library is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "libraries", "parameters"),
    [
        ("keras_mobilenet", ["keras"], 3_504_872 - 900 * 1281),
        ("torch_llama", ["torchax", "transformers"], None),
    ],
)
def test_a_model_of_another_library_is_predicted(
    name: str, libraries: list[str], parameters: int | None
) -> None:
    """Keras lists 3,504,872 trained parameters of MobileNetV2 with 1,000 classes."""
    if not all(map(importlib.util.find_spec, libraries)):
        pytest.skip(f"needs {libraries}")
    words = ["cost", f"examples/frameworks/{name}.py", "--mesh", "data:4", "--layout", "batch:data", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "layoutopt", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["predicted"]["step_seconds"] > 0
    assert parameters is None or found["model"]["parameters"] == parameters
