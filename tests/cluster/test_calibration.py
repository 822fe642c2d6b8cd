"""A calibration by two processes, one of which is killed: the next one goes on, and its profile prices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodels.calibration.probes import probes
from costmodels.calibration.runner import versions
from costmodels.hardware import read_hardware
from costmodels.pricing.pricer import pricer
from examples.mlp import model as perceptron
from mesh_tf_core import Layout, Mesh
from tests.cluster.job import Job, wait_for
from tests.costmodels.calibration.test_fit import recorded

MESH = Mesh("data:2;model:2")
REALLY = {
    "stores", "binary.same 64x256", "matmul 256x256x256", "permute data 8192",
    "all_reduce data+model 8192", "check gelu_grad 64x128",
}  # fmt: skip
"""What is measured; the rest is written down as if it had been, where a group over two processes takes twice
as long."""


@pytest.mark.nightly
def test_two_processes_measure_together(tmp_path: Path) -> None:
    out, partial = tmp_path / "two.json", tmp_path / "two.partial.json"
    command = ["calibrate", "--mesh", str(MESH), "--out", str(out), "--json"]
    with Job(["-n", "2"], command, tmp_path / "killed") as job:
        wait_for(partial.is_file, 100, "the first measurements")
        job.signal(1)
        code, said = job.end(60)
        assert (code, said, out.exists()) == (137, "", False)
        assert "worker 1 was killed by SIGKILL; run the same command again to continue" in job.log()
    key = json.loads(partial.read_text(encoding="utf-8"))["key"]
    assert key == {"mesh": str(MESH), "processes": 2, "quick": True, "versions": versions("jax")}

    content = {"key": key, "measurements": recorded(MESH, REALLY, 2)}
    partial.write_text(json.dumps(content), encoding="utf-8")
    with Job(["-n", "2"], command, tmp_path / "again") as job:
        code, said = job.end(100)
        assert code == 0, job.log()
        assert f"continuing from the measurements in {partial}" in job.log()
    assert not partial.exists()
    found = json.loads(said)
    assert found["machine"]["processes"] == found["machine"]["devices_per_process"] == 2
    assert found["measurements"] == len(probes(MESH, True, 2))

    machine = read_hardware(out)
    assert machine.devices_per_process == 2 and machine.calibration is not None
    rows = {m["name"]: m for m in json.loads(machine.calibration.measurements)}
    assert all(rows[name]["seconds"] > 0 and rows[name]["samples"] > 1 for name in REALLY)
    near, far = (
        pricer(machine, MESH).cost(perceptron().lower(MESH, Layout(x))).communication_seconds
        for x in ("batch:model", "batch:data")
    )
    assert 0 < near < far
