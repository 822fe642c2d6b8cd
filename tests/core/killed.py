"""A writer of checkpoints that is killed at random moments, and what must be there afterwards.

Every attempt is a process of its own, forked, which takes the directory's lock and writes checkpoint after
checkpoint, as a training does; it says each step once the checkpoint has its name.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mesh_tf_core.training import checkpoint
from tests.core.saved import whole

SIZES = (1, 1000, 60_000)


def variables(step: int) -> dict[str, Any]:
    """What the checkpoint of a step must hold."""
    return {f"v{size}": np.random.default_rng(step).normal(size=size) for size in SIZES}


@dataclass
class Counts:
    """What was seen in all attempts.

    Attributes:
      during: kills while a checkpoint was being written, by what they left.
      lost: attempts after which the newest whole checkpoint is older than the last one that was reported.
      torn: checkpoints under their name that were not whole.
      most: the most checkpoints that lay there; older ones go once a newer one is whole.
    """

    kills: int = 0
    during: int = 0
    lost: int = 0
    torn: int = 0
    written: int = 0
    most: int = 0
    faults: list[str] = field(default_factory=list)


def hunt(directory: Path, kills: int, seed: int = 0) -> Counts:
    """Kills a writer so many times, and looks after each."""
    rng, counts, theirs = random.Random(seed), Counts(), directory / "step-000000001-best"
    theirs.mkdir(parents=True)
    took = _seconds(directory)
    done = checkpoint.listed(directory)[0][0]
    while counts.kills < kills:
        reported = _attempt(directory, done, rng.uniform(0.0, 4.0 * took))
        counts.kills += 1
        counts.written += max(0, reported - done)
        left = [p.name for p in directory.iterdir() if p.name.startswith(".step-")]
        counts.during += bool(left)
        found = checkpoint.newest(directory)
        assert found is not None
        counts.torn += len(found.skipped)
        counts.most = max(counts.most, len(checkpoint.listed(directory)))
        if found.step < reported:
            counts.lost += 1
            counts.faults.append(f"step {reported} was reported, {found.step} is there; {left}")
        for name, value in variables(found.step).items():
            np.testing.assert_array_equal(found.read(name), value)
        done = found.step
    with checkpoint.owned(directory) as trouble:  # no dead process holds it
        assert trouble == ""
        checkpoint.write(directory, done + 1, whole(variables(done + 1)), {})
    assert theirs.is_dir() and len(checkpoint.listed(directory)) == 3
    assert not [p for p in directory.iterdir() if p.name.startswith(".step-")]  # and none is left for ever
    return counts


def _seconds(directory: Path) -> float:
    """Of one checkpoint."""
    began = time.monotonic()
    for step in (1, 2, 3):
        checkpoint.write(directory, step, whole(variables(step)), {})
    return (time.monotonic() - began) / 3


def _attempt(directory: Path, done: int, seconds: float) -> int:
    """A writer that goes on after step `done` and is killed so many seconds after it began; the last step
    that it reported."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with checkpoint.owned(directory):
                os.write(writes, b"0\n")
                for step in range(done + 1, done + 1000):
                    # Now and then the same step again, as after a stop that saved.
                    checkpoint.write(directory, step, whole(variables(step)), {})
                    if step % 3 == 0:
                        checkpoint.write(directory, step, whole(variables(step)), {})
                    os.write(writes, f"{step}\n".encode())
        finally:
            os._exit(1)
    os.close(writes)
    os.read(reads, 2)  # it has the lock
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    told = b""
    while part := os.read(reads, 65536):
        told += part
    os.close(reads)
    return max([done, *map(int, told.split())])
