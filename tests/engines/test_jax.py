"""The JAX engine gives what the lockstep oracle gives, in a process of its own with eight devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.jax_cases import BY_NIGHT, CASES, equal
from tests.jax_process import printed

ROOT = Path(__file__).resolve().parents[2]


def said(*when: str) -> dict[str, str]:
    found: dict[str, str] = printed("tests.engines.jax_cases", *when)
    return found


def test_equals_lockstep() -> None:
    assert said() == dict.fromkeys({*CASES, "no TensorFlow"} - BY_NIGHT, "")


@pytest.mark.nightly
def test_the_others_equal_lockstep() -> None:
    assert said("night") == dict.fromkeys({*BY_NIGHT, "no TensorFlow"}, "")


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["faults", *range(0, 36, 6)])
def test_sequence_context_and_hybrid_parallelism(what: str | int) -> None:
    found = printed("tests.engines.jax_layouts", str(what))
    assert found and found == dict.fromkeys(found, "")


def test_the_comparison_can_fail() -> None:
    import numpy as np

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        equal({"x": np.ones(2)}, {"x": np.array([1.0, 1.001])}, 1e-5)
    with pytest.raises(AssertionError, match="float64"):
        equal({"x": np.ones(2, np.float32)}, {"x": np.ones(2)}, 1e-5)
