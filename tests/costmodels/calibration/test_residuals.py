"""Residuals: what a profile's curves say beside what they were fitted to, and beside what they were not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import median

import pytest

from costmodels.calibration.clock import ClockNoise
from costmodels.calibration.profile import held_out, profile
from costmodels.calibration.residuals import residuals
from costmodels.calibration.runner import assemble
from costmodels.hardware import Hardware, load_hardware, write_profile
from mesh_tf_core import Cluster
from tests.costmodels.calibration.test_fit import MESH, fitted, measured

CLUSTER = Cluster("a:1", 2, 0)
CLUSTER.hosts = "a", "b"


@pytest.fixture(scope="module", params=[0.0, 0.1])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Hardware, float]:
    """A profile of a synthetic machine with so much noise, and its held-out error."""
    found = measured(request.param)
    fit = fitted(found)
    records = [{"name": name, **m} for name, m in found.items()]
    content = profile(assemble(MESH), fit, records, ClockNoise(0.0, 0.0), quick=True)
    return write_profile(content, tmp_path_factory.mktemp("profile") / "p.json"), held_out(fit)


def test_the_errors_are_those_of_the_fit(made: tuple[Hardware, float]) -> None:
    hardware, error = made
    found = residuals(hardware)
    unseen = [abs(r.predicted_seconds / r.measured_seconds - 1) for r in found if r.held_out]
    assert median(unseen) == pytest.approx(error, rel=1e-6)
    assert {r.what for r in found if r.held_out} == {"held out from the fit"}
    assert {"matmuls", "collectives", "element by element"} <= {r.what for r in found}
    assert all(r.measured_seconds > 0 and r.predicted_seconds > 0 and r.size > 0 for r in found)


def test_those_of_processes_are_met_by_their_own_curves(tmp_path: Path) -> None:
    found = measured(each=2)
    fit, records = fitted(found, 2), [{"name": name, **m} for name, m in found.items()]
    team = dataclasses.replace(
        assemble(MESH), devices=("/CPU:0", "/CPU:1"), hosts=("a", "b"), cluster=CLUSTER
    )
    content = profile(team, fit, records, ClockNoise(0.0, 0.0), quick=True)
    hardware = write_profile(content, tmp_path / "two.json")
    exchanged = [r for r in residuals(hardware) if r.what == "collectives"]
    assert len(exchanged) == 3 * 5 * 3
    assert all(r.predicted_seconds == pytest.approx(r.measured_seconds, rel=1e-6) for r in exchanged)


def test_other_hardware_has_none() -> None:
    assert residuals(load_hardware("tpu-v2")) == []
