"""A process that solves tasks with HiGHS, started with the first task and kept for the next."""

from __future__ import annotations

import atexit
import pickle
import subprocess
import threading

from layoutopt.runtime.own_process import command
from layoutopt.solver.backends.highs_task import HighsAnswer, Task


class Worker:
    """The door to the process; it starts again after it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        atexit.register(self.end)

    def ask(self, task: Task) -> HighsAnswer:
        """The process's answer; RuntimeError if it died."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                pickle.dump(task, process.stdin)
                process.stdin.flush()
                found = pickle.load(process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                self.end()
                raise RuntimeError(
                    "the HiGHS worker process ended without an answer, perhaps for lack of memory"
                ) from None
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, HighsAnswer)
        return found

    def end(self) -> None:
        """Ends the process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                command("layoutopt.solver.backends.highs_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends this process
            )
        return self._process
