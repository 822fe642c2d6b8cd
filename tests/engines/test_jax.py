"""The JAX engine gives what the lockstep oracle gives, in a process of its own with eight devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.jax_cases import CASES, equal

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.jax_cases"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", [*CASES, "no TensorFlow"])
def test_equals_lockstep(said: dict[str, str], case: str) -> None:
    assert said[case] == ""


def test_every_case_is_run(said: dict[str, str]) -> None:
    assert said.keys() == {*CASES, "no TensorFlow"}


def test_the_comparison_can_fail() -> None:
    import numpy as np

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        equal({"x": np.ones(2)}, {"x": np.array([1.0, 1.001])}, 1e-5)
    with pytest.raises(AssertionError, match="float64"):
        equal({"x": np.ones(2, np.float32)}, {"x": np.ones(2)}, 1e-5)
