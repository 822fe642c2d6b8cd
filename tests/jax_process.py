"""A module of the tests in processes of its own, where JAX has CPU devices alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from layoutopt.launching import free_port
from mesh_tf_core.engines.jax.meeting import ADDRESS, PROCESS, PROCESSES

ROOT = Path(__file__).resolve().parents[1]


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
