"""A module of the tests in processes of its own, where JAX has CPU devices alone."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mesh_tf_core.engines.jax.rendezvous import ADDRESS, PROCESS, PROCESSES

ROOT = Path(__file__).resolve().parents[1]
PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections."""


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    return next(port for port in random.SystemRandom().sample(PORTS, len(PORTS)) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def printed(module: str, *args: str, processes: int = 1) -> Any:
    """The JSON that `python -m module` prints, or the first of several processes that make one job."""
    job = {ADDRESS: f"127.0.0.1:{free_port()}", PROCESSES: str(processes)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            # Compiling takes nearly all of the time.
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                **({**job, PROCESS: str(index)} if processes > 1 else {}),
            },
        )
        for index in range(processes)
    ]
    with ThreadPoolExecutor(processes) as pool:  # none waits for somebody to read what it says
        said = list(pool.map(lambda one: one.communicate(), started))
    for one, (_, why) in zip(started, said, strict=True):
        assert one.returncode == 0, why[-3000:]
    return json.loads(said[0][0].splitlines()[-1])  # gloo writes there too
