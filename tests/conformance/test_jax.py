"""Every operation on the JAX engine under layouts: a sample of them by day, every kind of layout by night,
in one process and in several."""

from __future__ import annotations

import pytest

from tests.conformance.samples import SAMPLES
from tests.jax_process import printed


@pytest.mark.parametrize(
    ("mesh", "kinds", "every", "processes"),
    [
        ("x:2", 1, 24, 1),
        pytest.param("x:2;y:2", 0, 1, 1, marks=pytest.mark.nightly),
        pytest.param("x:2;y:4", 0, 1, 1, marks=pytest.mark.nightly),
        pytest.param("x:2;y:4", 2, 1, 2, marks=pytest.mark.nightly),
        pytest.param("x:2;y:4", 2, 1, 4, marks=pytest.mark.nightly),
    ],
)
def test_operations_give_the_dense_result(mesh: str, kinds: int, every: int, processes: int) -> None:
    found = printed("tests.conformance.jax_cases", mesh, str(kinds), str(every), processes=processes)
    assert {name: why for name, why in found["said"].items() if why} == {}
    assert len(found["said"]) == len(SAMPLES[::every])
    assert found["layouts"] >= len(found["said"])
