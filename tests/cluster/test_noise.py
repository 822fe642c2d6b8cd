"""What a job of one machine listens on is loopback alone, and noise there does not end it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from mesh_tf_core.training import checkpoint
from tests.cluster.job import Job, wait_for

LISTENS = "0A"
"""Of a socket, in Linux's tables of them."""
STEPS, EVERY = 300, 50
NOISE, CONNECTIONS = 10_000, 200


def tree(pid: int) -> list[int]:
    """A process and all that come from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(Address, port) of every socket of these processes on which something listens."""
    own = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                own.add(os.readlink(descriptor))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                words = (address[i : i + 8] for i in range(0, len(address), 8))
                where = ipaddress.ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
                found.add((str(getattr(where, "ipv4_mapped", None) or where), int(port, 16)))
    return found


@pytest.mark.nightly
def test_noise_does_not_end_a_job(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    words = ["train", "examples/mlp.py", "--mesh", "data:2;model:2", "--layout", "batch:data;hidden:model"]
    numbers = ["--steps", str(STEPS), "--every", str(EVERY), "--held-out", "0", "--checkpoint", str(saved)]
    noise = np.random.default_rng(0).bytes(NOISE)
    with Job(["-n", "2"], [*words, *numbers], saved) as job, contextlib.ExitStack() as stack:
        wait_for(lambda: job.newest() >= EVERY, 100, "a checkpoint")
        ports = listening(tree(job.process.pid))
        assert len(ports) >= 2 and {address for address, _ in ports} == {"127.0.0.1"}  # gloo in each
        for place in ports:
            for _ in range(CONNECTIONS):
                one = stack.enter_context(socket.socket())
                one.settimeout(5)
                with contextlib.suppress(OSError):  # the other side may end it
                    one.connect(place)
                    one.sendall(noise)
        assert job.newest() < STEPS, "too fast: raise STEPS"
        code, _ = job.end(200)
        assert code == 0, job.log()
        assert "; restarting" not in job.log()
    last = checkpoint.newest(saved)
    assert last is not None and (last.step, last.skipped) == (STEPS, ())
