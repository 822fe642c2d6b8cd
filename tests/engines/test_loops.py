"""Every engine runs loops as NumPy does: forwards, backwards, in each other, with iterations left out."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.engines.loops import Iterations
from mesh_tf_core.engines.tf.local import TfLocalEngine
from tests.engines.loop_cases import CASES


def lockstep(program: Any, batch: Any) -> Any:
    return LockstepEngine(program).step(batch)


@pytest.mark.parametrize("name", CASES)
def test_lockstep(name: str) -> None:
    CASES[name].check(lockstep)


@pytest.mark.parametrize("exchange", ["direct", "group"])
@pytest.mark.parametrize("name", CASES)
def test_tensorflow(name: str, exchange: str, devices: Any) -> None:
    CASES[name].check(lambda program, batch: TfLocalEngine(program, devices[:2], exchange).step(batch))


@pytest.mark.parametrize("name", ["forward, runs 1011", "counted until 3"])
def test_the_comparison_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration that should not run, runs."""
    monkeypatch.setattr(Iterations, "skip", Iterations.run)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        CASES[name].check(lockstep)
