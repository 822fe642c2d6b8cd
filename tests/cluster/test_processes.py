"""A training over two processes, two of whose workers are killed, learns what one process learns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from layoutopt.cli.given import UNDECIDED
from layoutopt.models.loading import load_model
from mesh_tf_core.engines.jax.codes import SECRET, SECRET_FILE
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.training import Trainer, checkpoint
from tests.cluster.job import ROOT, Job, wait_for

MODEL = '''
from examples.mlp import data as digits
from examples.mlp import model as perceptron


def model(batch: int = 32, hidden: int = 512, layers: int = 1):
    return perceptron(batch, hidden, layers)


def data(batch: int = 32, split: str = "train", rows=None):
    """Every process makes its own rows alone; the last held-out batch is short."""
    for number, whole in enumerate(digits(batch, split)):
        is_last = split == "held-out" and number == 10
        count = 20 if is_last else batch
        some = slice(count) if rows is None else rows[rows < count]
        yield {name: array[some] for name, array in whole.items()}
        if is_last:
            return
'''
MESH, LAYOUT, STORAGE = "data:2;model:2", "batch:data;hidden:model", "zero3"
STEPS, EVERY = 150, 10


@pytest.mark.nightly
def test_killed_workers_change_nothing(tmp_path: Path) -> None:
    """One worker in a step, the one that writes while it writes; variables are split over both processes."""
    file = tmp_path / "model.py"
    file.write_text(MODEL, encoding="utf-8")
    loaded = load_model(str(file))
    alone = Trainer(
        loaded.model, Mesh(MESH), Layout(LAYOUT), type(UNDECIDED)(storage=[STORAGE]).options(loaded)
    )
    losses = [found["loss"] for found in alone.fit(loaded.data(), STEPS)]
    held_out = alone.evaluate(loaded.data("held-out", endless=False))

    saved = tmp_path / "saved"
    words = ["train", str(file), "--mesh", MESH, "--layout", LAYOUT, "--storage", STORAGE, "--json"]
    numbers = ["--steps", str(STEPS), "--every", str(EVERY), "--held-out", "100", "--checkpoint", str(saved)]
    with Job(["-n", "2"], [*words, *numbers], saved) as job:
        for worker, step in ((1, EVERY), (0, 4 * EVERY)):
            wait_for(lambda step=step: job.newest() >= step, 100, f"step {step}")
            if worker == 0:
                wait_for(job.writing, 100, "a checkpoint", look=0.0005)
            before, killed_at = job.workers(), time.monotonic()
            job.signal(worker)
            wait_for(lambda before=before: not any(map(job.alive, before.values())), 60, "the others' end")
            assert time.monotonic() - killed_at < 60
        code, out = job.end(100)
        log, left = job.log(), job.workers()
    assert code == 0, log
    assert not left
    assert (
        '{"error": "worker 1 (' in log
        and "was lost: no heartbeat for 10 s, because it ended, hangs or is" in log
    )
    assert log.count("launch: worker 1 was killed by SIGKILL; restarting from step-") == 1
    assert log.count("launch: worker 0 was killed by SIGKILL; restarting from step-") == 1

    found = json.loads(out)
    assert found["steps"] == STEPS and found["first_step"] >= 4 * EVERY
    assert found["loss"] == pytest.approx(losses[found["first_step"] :], rel=1e-5)
    assert found["held_out"] == pytest.approx(held_out, rel=1e-4)  # to its end, where a batch is short
    last = checkpoint.newest(saved)
    assert last is not None and last.step == STEPS
    for name in alone.program.variables:
        np.testing.assert_allclose(last.read(name), alone.engine.read(name), rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_a_signal_ends_all_after_the_same_step(tmp_path: Path) -> None:
    """The launcher asks its workers; what they save is the step that the first one names."""
    saved = tmp_path / "saved"
    words = ["train", "examples/mlp.py", "--mesh", MESH, "--layout", LAYOUT, "--checkpoint", str(saved)]
    numbers = ["--steps", "100000", "--every", str(EVERY), "--held-out", "0"]
    with Job(["-n", "2"], [*words, *numbers], saved) as job:
        wait_for(lambda: job.newest() >= EVERY, 100, "a checkpoint")
        job.process.send_signal(signal.SIGTERM)
        code, _ = job.end(30)
        log, left = job.log(), job.workers()
    assert (code, left) == (143, {}), log
    said = re.search(r"stopped after step (\d+) of 100000, saved in (.+); the same command continues", log)
    assert said is not None and said[2] == str(saved), log
    last = checkpoint.newest(saved)
    assert last is not None and (last.step, last.skipped) == (int(said[1]), ())


@pytest.mark.nightly
def test_a_process_with_a_number_of_a_job_that_runs_is_refused(tmp_path: Path) -> None:
    """The job goes on, and ends as it should."""
    saved = tmp_path / "saved"
    words = ["train", "examples/mlp.py", "--mesh", MESH, "--layout", LAYOUT, "--held-out", "0"]
    numbers = ["--steps", "1000000", "--every", "50", "--checkpoint", str(saved)]
    with Job(["-n", "2"], [*words, *numbers], saved) as job:
        wait_for(lambda: job.newest() >= 50, 100, "a checkpoint")
        environment = Path(f"/proc/{job.workers()[1]}/environ").read_bytes().split(b"\0")
        own = dict(e.decode().partition("=")[::2] for e in environment)
        address = own["JAX_COORDINATOR_ADDRESS"]
        secret = {name: value for name, value in own.items() if name in (SECRET, SECRET_FILE)}
        assert secret  # without it, messages of the other process would not be read
        for number in ("1", "0"):
            where = [
                "--coordinator",
                address,
                "--processes",
                "2",
                "--process",
                number,
                "--start-timeout",
                "60",
            ]
            command = [sys.executable, "-m", "layoutopt", *words, *where]
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | secret, capture_output=True, text=True, check=False
            )
            assert done.returncode == 2, done.stderr
            assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: cluster: ")
            assert number == "0" or f"the job at {address} already has a process 1" in done.stderr
        before = job.newest()
        wait_for(lambda: job.newest() > before, 60, "another checkpoint")
        job.process.send_signal(signal.SIGTERM)
        code, _ = job.end(60)
        assert (code, "; restarting" in job.log()) == (143, False), job.log()
