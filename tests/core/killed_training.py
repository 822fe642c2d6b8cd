"""A whole training that is killed at random moments, every second time while it saves, and begun again until
it is done: does it learn the same as one that nobody disturbed?

    python -m tests.core.killed_training DIRECTORY KILLS

Every attempt is a process of its own, forked, in which nothing but the model, the trainer and the checkpoint
is made anew; so hundreds of kills take minutes. Whole commands are killed by `benchmarks/kill_commands.py`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.training import checkpoint

STEPS, EVERY = 40, 4
MESH, LAYOUT = "data:2;model:2", "batch:data;hidden:model"


def model() -> mtf.Model:
    """A perceptron of one hidden layer."""
    from examples.mlp import model

    return model(batch=8, hidden=16, layers=1)


def data() -> Iterator[dict[str, Any]]:
    """The same batches every time."""
    for number in range(STEPS):
        rng = np.random.default_rng(number)
        labels = rng.integers(0, 10, 8).astype(np.int32)
        yield {"image": rng.random((8, 64), np.float32) + labels[:, None] / 10, "label": labels}


def train(directory: Path) -> None:
    """To the end, from the newest checkpoint."""
    trainer = mtf.Trainer(model(), MESH, LAYOUT, engine="lockstep")
    trainer.fit(data(), STEPS, directory, EVERY, keep=False)


def forked(directory: Path) -> int:
    """A process that trains."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train(directory)
            code = 0
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int | None:
    """How a process ended; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def saving(directory: Path) -> bool:
    """Whether a checkpoint is being written."""
    return directory.is_dir() and any(name.startswith(".step-") for name in os.listdir(directory))


def variables(directory: Path) -> dict[str, bytes]:
    """All of the last step."""
    found = checkpoint.newest(directory)
    assert found is not None and (found.step, found.skipped) == (STEPS, ()), found
    return {name: found.read(name).tobytes() for name in found.variables}


def hunt(directory: Path, kills: int, seed: int = 0) -> dict[str, int]:
    """Kills so many times; what was seen. `back`: times that a newest step was older than before; `torn`:
    checkpoints that were not whole; `differ`: runs that ended with other variables."""
    rng, began = random.Random(seed), time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(forked(directory / "whole"), 0)[1]) == 0
    seconds, wanted = time.monotonic() - began, variables(directory / "whole")
    counts = {
        "kills": 0,
        "while saving": 0,
        "left unfinished": 0,
        "runs": 0,
        "back": 0,
        "torn": 0,
        "differ": 0,
    }
    place, step = directory / "run", -1
    while counts["kills"] < kills or counts["runs"] == 0:
        pid, code = forked(place), None
        until, saves = time.monotonic() + rng.uniform(0.0, 0.7 * seconds), counts["kills"] % 2 == 1
        while counts["kills"] >= kills or time.monotonic() < until or (saves and not saving(place)):
            if (code := ended(pid)) is not None:
                break
            time.sleep(0.0002)
        if code is None:
            counts["while saving"] += saving(place)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            counts["kills"] += 1
            counts["left unfinished"] += saving(place)
        else:
            assert code == 0, code
            counts["runs"] += 1
            counts["differ"] += variables(place) != wanted
            shutil.rmtree(place)
            step = -1
            continue
        found = checkpoint.newest(place) if place.is_dir() else None
        counts["torn"] += 0 if found is None else len(found.skipped)
        counts["back"] += (-1 if found is None else found.step) < step
        step = max(step, -1 if found is None else found.step)
    return counts


if __name__ == "__main__":
    print(json.dumps(hunt(Path(sys.argv[1]), int(sys.argv[2]))))
