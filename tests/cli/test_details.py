"""What a plan file says of its hardware, for reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from costmodels.calibration.clock import ClockNoise
from costmodels.calibration.profile import profile
from costmodels.calibration.runner import assemble
from costmodels.hardware import load_hardware, write_profile
from examples.mlp import model as mlp
from layoutopt.plan.details import HardwareInfo
from layoutopt.plan.machine_details import calibration_details, errors_known, hardware_details
from mesh_tf_core import Mesh
from tests.costmodels.calibration import test_fit


def details(hardware: str, mesh: str) -> HardwareInfo:
    machine = load_hardware(hardware)
    return hardware_details(machine, Mesh(mesh), errors_known(machine, mlp(), ()))


@pytest.mark.parametrize(
    ("hardware", "mesh", "lies"),
    [
        (
            "tpu-v2",
            "data:32;model:16",
            {"data": "2 cores of a chip × 16 along x (ring)", "model": "16 along y (ring)"},
        ),
        (
            "tpu-v4",
            "data:2;model:4",
            {"data": "2 along x (line)", "model": "2 along y (line) × 2 along z (line)"},
        ),
        ("a100", "pod:4;data:2;model:8", {"pod": "4 nodes", "data": "2 nodes", "model": "8 inside a node"}),
        ("cpu-local", "data:2;one:1", {"data": "one machine's memory"}),
    ],
)
def test_where_mesh_axes_lie(hardware: str, mesh: str, lies: dict[str, str]) -> None:
    assert details(hardware, mesh).lies == lies


def test_the_shape_and_what_it_assumes() -> None:
    found = details("tpu-v2", "data:32;model:16")
    assert found.placement == "The mesh uses 16 × 16 chips of a torus."
    open_ends = details("tpu-v2", "data:16")
    assert any("no wraparound links on torus axis" in a for a in open_ends.assumptions)
    assert details("a100", "data:8").placement == ""


def test_a_calibrated_profile_brings_its_measurements(tmp_path: Path) -> None:
    found = test_fit.measured()
    records = [{"name": name, **m} for name, m in found.items()]
    team = assemble(test_fit.MESH)
    content = profile(team, test_fit.fitted(found), records, ClockNoise(0.0, 0.0), quick=True)
    details = calibration_details(write_profile(content, tmp_path / "p.json"))
    assert details is not None
    assert details.of == "measurement"
    assert {m.held_out for m in details.measurements} == {True, False}
    assert details.fit[-2].name == "start of a step"
    assert "mesh data:2;model:2; quiet machine" in details.notes[0]
    assert calibration_details(load_hardware("cpu-local")) is None


def test_a_worker_names_the_command_as_users_type_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "layoutopt", "trian"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: No such command 'trian'; did you mean 'train'? see layoutopt --help\n"
