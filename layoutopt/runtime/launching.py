"""A job of several processes on this machine: started together, ended together, started again after a
failure."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mesh_tf_core.engines.jax.codes import SECRET, SECRET_FILE
from mesh_tf_core.engines.jax.rendezvous import ADDRESS, PROCESS, PROCESSES, SOCKET
from mesh_tf_core.errors import ClusterError

POLL = 0.05
"""Seconds between two looks at the workers."""
SETTLE = 15.0
"""Seconds for the other workers to end once a worker has failed."""
FINISH = 60.0
"""Seconds for the other workers once a worker has finished."""
TERMINATE = 5.0
"""Seconds between asking processes to end and ending them."""
SAVE = 20.0
"""The same after a signal of the user: workers save their state."""
RESUME = "--resume"
"""The option of `train` that chooses a checkpoint."""
FOLDER = "layoutopt-job-"
"""Prefix of the folder in which the workers of one start connect."""
FINAL = (2, 3, 4)
"""Exit codes that another start would give again."""
REFUSED = 5.0
"""As `SETTLE`, after an exit code that no restart can repair; then the others are ended at once."""
STACK = ("@", "***", "terminate called", "what():")
"""The lines that an aborting process writes last, without meaning for users."""


@dataclass(frozen=True)
class Attempt:
    """The end of one run of all workers.

    Attributes:
      codes: exit code of each; -N if signal N ended it.
      stuck: workers that had to be killed because they did not end with the others.
      said: the last line of each on stderr; empty for worker 0, whose output is shown.
    """

    codes: tuple[int, ...]
    stuck: tuple[int, ...]
    said: tuple[str, ...]

    @property
    def culprit(self) -> int | None:
        """The worker that failed first; None if all finished."""
        failed = [i for i, code in enumerate(self.codes) if code]
        first = [i for i in failed if self.codes[i] in FINAL]
        first += [i for i in failed if i not in self.stuck and self.codes[i] != ClusterError.exit_code]
        return next(iter((*first, *self.stuck, *failed)), None)

    @property
    def exit_code(self) -> int:
        """The exit code, as a shell reports it."""
        at = self.culprit
        if at is None:
            return 0
        if at in self.stuck:
            return ClusterError.exit_code
        return self.codes[at] if self.codes[at] > 0 else 128 - self.codes[at]

    def reason(self) -> str:
        """The culprit's end, in words."""
        at = self.culprit
        assert at is not None
        code = self.codes[at]
        if at in self.stuck:
            text = f"worker {at} stopped responding"
        elif code < 0:
            text = f"worker {at} was killed by {_signal_name(-code)}"
        else:
            text = f"worker {at} ended with exit code {code}"
        return f"{text}: {self.said[at]}" if self.said[at] else text


def launch(
    command: Sequence[str],
    processes: int,
    restarts: int = 3,
    checkpoint: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    advice: str = "add --checkpoint DIR to resume after a failure",
) -> int:
    """Runs `layoutopt COMMAND` as `processes` workers; the exit code of the job.

    A failed job restarts if it has a checkpoint, at most `restarts` times in a row without a new checkpoint.
    However this process ends, no worker stays.

    Args:
      checkpoint: the directory in which the command saves.
      say: called with every event of a worker.
      advice: what a user can do after a failure without a checkpoint.
    """
    tried, newest, began = 0, _newest(checkpoint), _there(checkpoint)
    while True:
        attempt = run_once(command, processes)
        if attempt.culprit is None or attempt.exit_code in FINAL:
            if attempt.culprit:  # worker 0 has said its own error
                say(attempt.reason())
            return attempt.exit_code
        if checkpoint is None:
            say(f"{attempt.reason()}; {advice}")
            return attempt.exit_code
        if _there(checkpoint) != began:  # what was chosen to go on from has been gone on from
            command = _without(command, RESUME)
        saved = _newest(checkpoint)
        tried, newest = (1 if saved != newest else tried + 1), saved
        if tried > restarts:
            say(f"{attempt.reason()}; stopped after {restarts} restarts without a new checkpoint")
            return attempt.exit_code
        where = f"from {newest}" if newest else "from the beginning, because there is no checkpoint yet"
        say(f"{attempt.reason()}; restarting {where} (restart {tried} of {restarts})")


def run_once(command: Sequence[str], processes: int) -> Attempt:
    """Starts all workers, which get a secret of this start, and waits until all have ended."""
    with contextlib.ExitStack() as stack:
        leash, held = os.pipe()
        stack.callback(os.close, held)
        stack.callback(os.close, leash)
        # A folder of mode 0700: nobody else can connect to a socket in it, as everybody can to a port.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True))
        address, secret = f"{SOCKET}{folder}/coordinator", secrets.token_hex(32)
        workers: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, workers)
        notes = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(processes)]
        for index in range(processes):
            place = {ADDRESS: address, PROCESSES: str(processes), PROCESS: str(index), SECRET: secret}
            place[SECRET_FILE] = ""
            worker = subprocess.Popen(
                [sys.executable, "-m", "layoutopt.cli.worker", str(leash), *command],
                env={**os.environ, **place},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if index else None,
                stderr=notes[index] if index else None,
                pass_fds=(leash,),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends them all
            )
            workers.append(worker)
        try:
            stuck = _watched(workers)
        except KeyboardInterrupt:
            _end(workers, SAVE)
            raise
        codes = tuple(worker.returncode for worker in workers)
        return Attempt(codes, stuck, tuple(_last_line(note) for note in notes))


def _watched(workers: Sequence[subprocess.Popen[bytes]]) -> tuple[int, ...]:
    """Waits until all have ended; those that did not after another had are ended, and returned."""
    until = float("inf")
    while None in (found := [worker.poll() for worker in workers]):
        codes, now = [code for code in found if code is not None], time.monotonic()
        if any(code in FINAL for code in codes):
            until = min(until, now + REFUSED)
        elif any(codes):
            until = min(until, now + SETTLE)
        elif codes:
            until = min(until, now + FINISH)
        if now > until:
            stuck = tuple(i for i, code in enumerate(found) if code is None)
            _end([workers[i] for i in stuck], 1.0 if any(code in FINAL for code in codes) else None)
            return stuck
        time.sleep(POLL)
    return ()


def _end(workers: Sequence[subprocess.Popen[bytes]], seconds: float | None = None) -> None:
    """Ends workers, whatever they are doing, with all that they started; they have `seconds` to do it."""
    asked = TERMINATE if seconds is None else seconds
    for numbers, patience in (((signal.SIGTERM, signal.SIGCONT), asked), ((signal.SIGKILL,), None)):
        for worker in workers:
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    for number in numbers:  # a stopped process takes no other signal before it goes on
                        os.killpg(worker.pid, number)
        until = None if patience is None else time.monotonic() + patience
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(None if until is None else max(0.0, until - time.monotonic()))


def _newest(checkpoint: Path | None) -> str | None:
    """Name of the newest checkpoint."""
    from mesh_tf_core.training.checkpoint import listed

    found = listed(checkpoint) if checkpoint else []
    return found[0][1].name if found else None


def _there(checkpoint: Path | None) -> frozenset[tuple[str, int]]:
    """Which checkpoints there are: another one of the same step is another one."""
    from mesh_tf_core.training.checkpoint import listed

    found = set()
    for _, path in listed(checkpoint) if checkpoint else ():
        with contextlib.suppress(OSError):
            found.add((path.name, path.stat().st_ino))
    return frozenset(found)


def _without(command: Sequence[str], option: str) -> list[str]:
    before = ["", *command]
    return [
        word
        for last, word in zip(before, command, strict=False)
        if option not in (last, word) and not word.startswith(f"{option}=")
    ]


def _last_line(notes: IO[bytes]) -> str:
    size = notes.seek(0, os.SEEK_END)
    notes.seek(max(0, size - 4096))
    lines = notes.read().decode(errors="replace").split("\n")
    found = [line.strip() for line in reversed(lines) if line.strip()]
    return next((line for line in found if not line.startswith(STACK)), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
