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
    assert found.exit_code == 2 and "replica 2/2 does not exist: use 0/2 to 1/2" in found.stderr
    found = run(*WORDS, "--meet", "dir=/x,replica=0/2", "--diloco", "data")
    assert found.exit_code == 2
    assert found.stderr == (
        "error: --meet cannot be combined with --diloco: with meet, every job trains a single replica; "
        "remove one of them\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_a_replica_that_waits_ends_at_once(number: int, tmp_path: Path) -> None:
    """Alone, with an hour's patience, and a stray state beside; what it did is saved, and goes on."""
    where, saved = tmp_path / "run", tmp_path / "saved"
    meet = f"dir={where},replica=0/2,period=5,patience=3600"
    words = [*WORDS[:-1], "lockstep", "--steps", "10", "--held-out", "0", "--checkpoint", str(saved)]
    whole = [sys.executable, "-m", "layoutopt", *words, "--meet", meet]
    for _ in range(2):  # the second one is resumed
        job = subprocess.Popen(whole, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 120
        while not (where / "round-00000000-replica-0.npz").exists():
            assert job.poll() is None and time.monotonic() < until, job.communicate()[1]
            time.sleep(0.05)
        (where / "round-00000000-replica-0.npz").unlink()
        (where / "state-99999999.npz").write_bytes(b"a copy")
        began = time.monotonic()
        time.sleep(0.5)
        job.send_signal(number)
        _, said = job.communicate(timeout=60)
        assert time.monotonic() - began < 10.0 and job.returncode == 128 + number, said
        assert "Traceback" not in said
    assert "resuming from step 5" in said and f"{saved} is unchanged" in said
    assert (where / "state-99999999.npz").read_bytes() == b"a copy"


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
    met = [line.partition("synchronised as ")[2] for line in said.splitlines() if "synchronised as" in line]
    assert len(met) == 40 and met[0] == "round 1, 2 of 2 replicas"
    assert met[-1] == "round 40, 1 of 2 replicas"
    back = job(1, 20, 0.0)
    _, said = back.communicate(timeout=300)
    assert back.returncode == 0 and "synchronised as round 42, 1 of 2 replicas" in said
    assert not [path for path in where.iterdir() if path.name.startswith("state-0000001")]
