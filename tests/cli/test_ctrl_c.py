"""Ctrl-C, and once more while large layers are stepped through and written: it ends, and what is saved is
whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mesh_tf_core.training import checkpoint
from tests.cluster.job import ROOT, wait_for

TRAIN = ["train", "examples/mlp.py", "--set", "hidden=2048", "--set", "layers=4", "--set", "batch=64"]
ON = ["--mesh", "data:2", "--layout", "batch:data", "--steps", "1000", "--every", "1", "--held-out", "0"]


@pytest.mark.nightly
@pytest.mark.parametrize("apart", [0.3, 2.0])
@pytest.mark.parametrize(
    ("before", "after"), [([], ["--engine", "local"]), ([], ["--engine", "jax"]), (["launch", "--"], [])]
)
def test_ctrl_c_twice_leaves_whole_checkpoints(
    tmp_path: Path, before: list[str], after: list[str], apart: float
) -> None:
    saved, said = tmp_path / "saved", tmp_path / "said"
    command = [*before, *TRAIN, *ON, *after, "--checkpoint", str(saved)]
    with said.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "layoutopt", *command], cwd=ROOT, stderr=file)
    try:
        wait_for(lambda: checkpoint.listed(saved)[1:], 200, "two checkpoints")
        wait_for(lambda: any(name.startswith(".step-") for name in os.listdir(saved)), 60, "a third")
        for wait in (apart, 0.0):
            process.send_signal(signal.SIGINT)
            time.sleep(wait)
        # The second one may meet the interpreter's own end, of which it is killed: 130 to shells.
        assert process.wait(60) in (130, -signal.SIGINT), said.read_text()
    finally:
        process.kill()
    assert "Traceback" not in said.read_text() and "Fatal" not in said.read_text()
    found = checkpoint.newest(saved)
    assert found is not None and found.skipped == ()
