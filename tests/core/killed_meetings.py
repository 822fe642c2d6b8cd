"""Two replicas that meet in a directory and are killed, and what must come of it: the undisturbed run.

Each replica is a process of its own, forked, with checkpoints of its own. It is killed at a random moment, or
kills itself before or after one of the operations by which files appear (of a checkpoint, a post, a state),
and is started again until it has done all its steps.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.training import checkpoint
from mesh_tf_core.training.decoupled import Decoupled
from mesh_tf_core.training.trainer import Trainer
from tests.core.test_replicas import data, model

COUNT, STEPS, PERIOD, EVERY = 2, 21, 3, 4
PATIENCE = 300.0
"""Seconds: nobody is too late."""
OPERATIONS = ("fsync", "replace", "rename", "link", "unlink", "mkdir")
MOST = 6
"""Kills of one run, after which it is left alone."""


@dataclass
class Counts:
    """What was seen.

    Attributes:
      kills: of both replicas; inside: of these within an operation on files.
      runs: to their end; equal: that ended with the undisturbed run's variables and states.
    """

    kills: int = 0
    inside: int = 0
    runs: int = 0
    equal: int = 0
    faults: list[str] = field(default_factory=list)


def hunt(folder: Path, kills: int, seed: int = 0, **how: Any) -> Counts:
    """Kills until there were so many, run after run."""
    rng, counts = random.Random(seed), Counts()
    wanted = _run(folder / "whole", rng, Counts(), 0, how)
    while counts.kills < kills:
        counts.runs += 1
        found = _run(folder / f"run-{counts.runs}", rng, counts, min(MOST, kills - counts.kills), how)
        if found == wanted:
            counts.equal += 1
        else:
            counts.faults.append(f"run {counts.runs}: {found} instead of {wanted}")
    return counts


def _run(place: Path, rng: random.Random, counts: Counts, kills: int, how: dict[str, Any]) -> dict[str, str]:
    """One run to its end; digests of the variables that every replica ends with, and the last state."""
    place.mkdir(parents=True)
    left, running = set(range(COUNT)), dict[int, tuple[int, float]]()
    until = time.monotonic() + PATIENCE / 2
    while left:
        for replica in sorted(left - {one for one, _ in running.values()}):
            at = rng.choice([rng.randint(1, 60), 0]) if kills else 0
            # Most of the seconds are the start's; a kill there is one too.
            moment = time.monotonic() + rng.uniform(0.0, 1.5) if kills and not at else float("inf")
            running[_started(place, replica, at, rng.random() < 0.5, how)] = replica, moment
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            replica, _ = running.pop(ended)
            if os.WIFSIGNALED(status):
                counts.kills, counts.inside = counts.kills + 1, counts.inside + 1
                kills -= 1
            elif os.WEXITSTATUS(status):
                counts.faults.append((place / f"said-{replica}").read_text())
                raise SystemExit(counts.faults[-1])
            else:
                left.remove(replica)
        for pid, (_, moment) in [*running.items()]:
            if time.monotonic() > moment:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                running.pop(pid)
                counts.kills, kills = counts.kills + 1, kills - 1
        if time.monotonic() > until:
            raise SystemExit(f"{place.name} does not end; {counts}")
        time.sleep(0.005)
    return {f"replica {n}": _digest(place / f"saved-{n}") for n in range(COUNT)} | {
        "states": max(path.name for path in (place / "meet").iterdir() if path.name.startswith("state"))
    }


def _started(place: Path, replica: int, at: int, before: bool, how: dict[str, Any]) -> int:
    """A replica's process; it kills itself at operation `at`, if that is not 0."""
    pid = os.fork()
    if pid:
        return pid
    try:
        handle = os.open(place / f"said-{replica}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 2)
        trainer = Trainer(model(mtf.Adam(3e-2)), "x:1", engine="lockstep")
        meet = Decoupled(place / "meet", replica, COUNT, PERIOD, patience=PATIENCE, **how)
        if at:
            _dies_at(at, before)
        trainer.fit(data(), STEPS, place / f"saved-{replica}", EVERY, meet=meet)
        os._exit(0)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)


def _dies_at(last: int, before: bool) -> None:
    """From now on this process kills itself before or after its operation of this number."""
    numbers: Iterator[int] = iter(range(1, 1 << 30))

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **more: Any) -> Any:
            number = next(numbers)
            if number == last and before:
                os.kill(os.getpid(), signal.SIGKILL)
            found = operation(*args, **more)
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return done

    for name in OPERATIONS:
        setattr(os, name, dying(getattr(os, name)))


def _digest(place: Path) -> str:
    """Of all variables of the last checkpoint, which is of the last step."""
    found = checkpoint.newest(place)
    assert found is not None and (found.step, found.skipped) == (STEPS, ()), found
    arrays = (np.ascontiguousarray(found.read(name)).tobytes() for name in sorted(found.variables))
    return hashlib.sha256(b"".join(arrays)).hexdigest()[:16]
