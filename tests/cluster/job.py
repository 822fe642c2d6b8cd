"""A launched job under observation: its workers by index, its checkpoints, signals at chosen moments."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from mesh_tf_core.training.checkpoint import listed, newest

ROOT = Path(__file__).resolve().parents[2]


def wait_for(found: Callable[[], Any], seconds: float, what: str, look: float = 0.02) -> Any:
    """What `found` returns once it is true, asked every `look` seconds."""
    until = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > until:
            raise AssertionError(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(look)
    return value


class Job(contextlib.AbstractContextManager["Job"]):
    """`layoutopt launch` in a process of its own, ended at the end of the context.

    Args:
      options: of `launch`; command: what the workers run.
      checkpoint: the directory that the command saves into.
    """

    def __init__(self, options: Sequence[str], command: Sequence[str], checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        checkpoint.mkdir(parents=True, exist_ok=True)
        self._log = (checkpoint.parent / f"{checkpoint.name}.log").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "layoutopt", "launch", *options, "--", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def workers(self) -> dict[int, int]:
        """Index -> process id, of the workers that live."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            # One that is about to start has another environment still.
            with contextlib.suppress(OSError, StopIteration):
                state, parent = stat.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    environment = (stat.parent / "environ").read_bytes().split(b"\0")
                    index = next(e for e in environment if e.startswith(b"JAX_PROCESS_ID="))
                    found[int(index.partition(b"=")[2])] = int(stat.parent.name)
        return found

    def alive(self, pid: int) -> bool:
        """Whether a worker of this job still runs."""
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            return False
        return int(parent) == self.process.pid and state != "Z"

    def newest(self) -> int:
        """Step of the newest checkpoint, -1 if there is none."""
        return next((step for step, _ in listed(self.checkpoint)), -1)

    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(name.startswith(".step-") for name in os.listdir(self.checkpoint))

    def signal(self, index: int, number: int = signal.SIGKILL) -> None:
        os.kill(wait_for(lambda: self.workers().get(index), 5, f"worker {index}'s start"), number)

    def end(self, seconds: float) -> tuple[int, str]:
        """Exit code, and what was written to stdout."""
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out

    def log(self) -> str:
        """What was written to stderr."""
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)
        self._log.close()


def contents(checkpoint: Path, step: int) -> str:
    """A digest of all variables of the newest checkpoint, which must be of this step; however many processes
    wrote it."""
    found = newest(checkpoint)
    assert found is not None and (found.step, found.skipped) == (step, ())
    sums = {name: hashlib.sha256(found.read(name).tobytes()).hexdigest() for name in found.variables}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:12]
