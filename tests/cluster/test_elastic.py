"""A training goes on with another number of processes and devices, under a layout that is searched for them;
no process holds a variable that is split over all."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from layoutopt.models.loading import load_model
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.training import Trainer, checkpoint
from tests.cluster.job import Job, wait_for

STEPS, EVERY = 300, 5


@pytest.mark.nightly
def test_a_job_goes_on_with_other_processes(tmp_path: Path) -> None:
    """Four are killed; two go on with a device each, under the best mesh and layout, and are ended; one goes
    on."""
    saved = tmp_path / "saved"
    sizes = ["layers=2", "hidden=256"]
    loaded = load_model("examples/mlp.py", sizes)
    whole = Trainer(loaded.model, "data:4;model:2", "batch:data;hidden:model", engine="lockstep")
    losses = [found["loss"] for found in whole.fit(loaded.data(), STEPS)]

    def command(*words: str, steps: int = STEPS) -> list[str]:
        settings = [word for size in sizes for word in ("--set", size)]
        numbers = ["--steps", str(steps), "--every", str(EVERY), "--held-out", "0", "--json"]
        return ["train", "examples/mlp.py", *settings, *numbers, "--checkpoint", str(saved), *words]

    given = ["--mesh", "data:4;model:2", "--layout", "batch:data;hidden:model", "--storage", "zero3"]
    for processes, words, number in ((4, given, signal.SIGKILL), (2, ["--layout", "auto"], signal.SIGTERM)):
        options = ["-n", str(processes), "--restarts", "0"]
        with Job(options, command(*words, steps=100_000), saved) as job:
            before = job.newest()
            wait_for(lambda: job.newest() >= before + 2 * EVERY, 200, "two checkpoints")  # noqa: B023
            job.signal(1, number) if number == signal.SIGKILL else job.process.send_signal(number)
            code, _ = job.end(60)
            assert code == (137 if number == signal.SIGKILL else 143), job.log()
        found = checkpoint.newest(saved)
        assert found is not None and found.extra["processes"] == processes
        assert Mesh(found.extra["mesh"]).devices == (8 if given is words else 2)
        assert found.step < STEPS - EVERY, "too fast: raise STEPS"
    with Job(["-n", "1"], command("--mesh", "data:2;model:4"), saved) as job:
        code, out = job.end(200)
        assert code == 0, job.log()
        assert f"resuming from step {found.step} of {saved}, saved on {found.extra['mesh']} in 2" in job.log()
    last = json.loads(out)
    assert (last["first_step"], last["steps"]) == (found.step, STEPS)
    assert last["loss"][:20] == pytest.approx(losses[found.step :][:20], rel=1e-5)
    assert last["loss"] == pytest.approx(losses[found.step :], rel=1e-4)  # rounding grows
    final = checkpoint.newest(saved)
    assert final is not None and final.step == STEPS
    for name in whole.program.variables:
        np.testing.assert_allclose(final.read(name), whole.engine.read(name), rtol=1e-3, atol=1e-5)


BYTES = 4 * 4096 * 4096
MODEL = """
import atexit
import os
import pathlib
import tracemalloc

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.training import checkpoint

tracemalloc.start()  # of NumPy's arrays: what the devices hold is not among it
newest = checkpoint.newest


def after_the_initial_values(*words):
    tracemalloc.reset_peak()
    return newest(*words)


checkpoint.newest = after_the_initial_values


def model(wide: int = 4096) -> mtf.Model:
    g = mtf.Graph()
    b, n, m = mtf.Dim("batch", 8), mtf.Dim("n", wide), mtf.Dim("wide", wide)
    w = g.variable("w", [n, m], mtf.ZEROS)
    y = mtf.einsum([g.input("x", [b, n], "float32"), w], [b, m])
    loss = mtf.reduce_mean(mtf.square(y - 1.0))
    return mtf.Model(loss, mtf.SGD(0.1))


def data():
    x = np.random.default_rng(0).normal(size=(8, 4096)).astype(np.float32)
    while True:
        yield {"x": x}


def tell() -> None:
    peak = tracemalloc.get_traced_memory()[1]
    pathlib.Path(__file__).with_name("peak-" + os.environ["JAX_PROCESS_ID"]).write_text(str(peak))


atexit.register(tell)
"""


@pytest.mark.nightly
def test_no_process_holds_a_variable_that_is_split_over_all(tmp_path: Path) -> None:
    """Of 64 MiB over four processes of two devices: neither when it is written nor when it is read."""
    file, saved = tmp_path / "model.py", tmp_path / "saved"
    file.write_text(MODEL, encoding="utf-8")
    for layout, steps in (("wide:a", 2), ("n:b;wide:a", 4)):
        words = ["train", str(file), "--mesh", "a:4;b:2", "--layout", layout, "--steps", str(steps)]
        with Job(["-n", "4"], [*words, "--held-out", "0", "--checkpoint", str(saved)], saved) as job:
            code, _ = job.end(200)
            assert code == 0, job.log()
        peaks = [int((tmp_path / f"peak-{n}").read_text()) for n in range(4)]
        # A process's quarter: the other of its two devices may hold the same, or another half.
        assert all(BYTES / 8 <= peak < 0.6 * BYTES for peak in peaks), [p / BYTES for p in peaks]
    found = checkpoint.newest(saved)
    assert found is not None and found.step == 4 and np.abs(found.read("w")).max() > 0
    assert {part.file for part in found.variables["w"].parts} == {f"{n:05d}.safetensors" for n in range(4)}
