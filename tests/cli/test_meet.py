"""`train --meet`: replicas that are jobs of their own; one is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

WORDS = ("train", "examples/mlp.py", "--mesh", "data:1", "--layout", "batch:data", "--engine", "local")


def test_what_it_refuses(run: Callable[..., Result]) -> None:
    found = run(*WORDS, "--meet", "dir=/x,replica=2/2")
    assert found.exit_code == 2 and "replica 2/2 is none: they are 0/2 to 1/2" in found.stderr
    found = run(*WORDS, "--meet", "dir=/x,replica=0/2", "--diloco", "data")
    assert found.exit_code == 2
    assert found.stderr == "error: --meet: each replica is one process's job; leave --diloco out\n"


@pytest.mark.nightly
def test_a_killed_replica_stops_nobody(tmp_path: Path) -> None:
    """Of two jobs one is killed in the middle; the other ends all its steps, and the first comes back to
    where that is."""
    where = tmp_path / "run"

    def job(replica: int, steps: int, patience: float) -> subprocess.Popen[str]:
        meet = f"dir={where},replica={replica}/2,period=10,patience={patience:g}"
        words = [sys.executable, "-m", "layoutopt", *WORDS, "--steps", str(steps), "--meet", meet]
        return subprocess.Popen([*words, "--held-out", "0"], stderr=subprocess.PIPE, text=True)

    kept, killed = job(0, 400, 2.0), job(1, 100_000, 60.0)
    while not (where / "state-00000002.npz").exists():
        assert kept.poll() is None and killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    _, said = kept.communicate(timeout=300)
    assert kept.returncode == 0, said
    met = [line.partition("met as ")[2] for line in said.splitlines() if "met as" in line]
    assert len(met) == 40 and met[0] == "round 1, 2 of 2 replicas"
    assert met[-1] == "round 40, 1 of 2 replicas"
    back = job(1, 20, 0.0)
    _, said = back.communicate(timeout=300)
    assert back.returncode == 0 and "met as round 42, 1 of 2 replicas" in said
    assert not [path for path in where.iterdir() if path.name.startswith("state-0000001")]
