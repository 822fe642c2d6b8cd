"""Every operation on the JAX engine under layouts: a sample of them by day, all by night."""

from __future__ import annotations

import pytest

from tests.conformance.samples import SAMPLES
from tests.jax_process import printed


@pytest.mark.parametrize(
    ("mesh", "layouts", "every"),
    [
        ("x:2", 1, 12),
        pytest.param("x:2;y:2", 6, 1, marks=pytest.mark.nightly),
        pytest.param("x:2;y:4", 6, 1, marks=pytest.mark.nightly),
    ],
)
def test_operations_give_the_dense_result(mesh: str, layouts: int, every: int) -> None:
    found = printed("tests.conformance.jax_cases", mesh, str(layouts), str(every))
    assert {name: why for name, why in found["said"].items() if why} == {}
    assert len(found["said"]) == len(SAMPLES[::every])
    assert found["layouts"] >= len(found["said"]) // 2
