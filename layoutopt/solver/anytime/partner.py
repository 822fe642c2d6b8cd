"""A second local search with another seed, in a separate process; the two exchange their results."""

from __future__ import annotations

import atexit
import contextlib
import pickle
import queue
import subprocess
import threading
from collections import deque
from typing import Any

from layoutopt.runtime.own_process import command
from layoutopt.solver.anytime.network import Network
from layoutopt.solver.form import Ints


class Partner:
    """The door to the process; `end` it.

    Attributes:
      news: (choices or None, bound) that it reported and that was not read yet.
    """

    def __init__(self, network: Network, seed: int) -> None:
        self.news: deque[tuple[Ints | None, float]] = deque()
        self._mail: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            command("layoutopt.solver.anytime.partner_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends this process
        )
        atexit.register(self.end)
        self._mail.put((network, seed))
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def tell(self, choices: Ints) -> None:
        """Sends it better choices."""
        self._mail.put(choices)

    def _write(self) -> None:
        pipe: Any = self._process.stdin
        with contextlib.suppress(OSError, ValueError):  # it has ended
            while (letter := self._mail.get()) is not None:
                pickle.dump(letter, pipe)
                pipe.flush()

    def _read(self) -> None:
        pipe: Any = self._process.stdout
        with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
            while True:
                self.news.append(pickle.load(pipe))

    def end(self) -> None:
        """Ends the process and the threads that communicate with it."""
        atexit.unregister(self.end)
        self._process.kill()
        self._process.wait()
        self._mail.put(None)
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was not sent is lost
                if pipe is not None:
                    pipe.close()
