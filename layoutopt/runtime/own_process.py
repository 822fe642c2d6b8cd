"""Python processes of ours beside this one, which import nothing from the current folder: it may contain
untrusted files."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

_START = """
import importlib
import sys
sys.path.insert(0, sys.argv[1])
importlib.import_module(sys.argv[2]).main()
"""
UNSENT = OSError, AttributeError, TypeError, pickle.PicklingError
"""Errors where this system starts no process, or a letter has what no other process can read."""
VARIABLE = "LAYOUTOPT_CORES"
"""The environment variable with the most processes that a search may use."""
Send = Callable[[object], object]
"""Hands a letter to the other process."""


def command(module: str) -> list[str]:
    """The command that runs `main` of one of our modules; `python -m` would look into the current folder
    first."""
    return [sys.executable, "-P", "-c", _START, str(Path(__file__).parents[2]), module]


def processes() -> int:
    """The number of processes that a search may use: one for each core, or fewer if `VARIABLE` says so;
    UserError if that is no number above 0."""
    from mesh_tf_core.cores import cores
    from mesh_tf_core.errors import UserError

    asked = os.environ.get(VARIABLE, "")
    if asked and (not asked.isdecimal() or not int(asked)):
        raise UserError(f"{VARIABLE} is {asked!r}; give a number of cores, such as 1, or unset it")
    return min(cores(), int(asked or cores()))


class OtherProcess:
    """A process that works beside this one, and letters to and from it (pickle); `end` it.

    Args:
      module: its `main` begins with `first_letter`.
      letter: the first one.

    Attributes:
      news: letters from it that were not read yet.

    Raises:
      one of `UNSENT`.
    """

    def __init__(self, module: str, letter: object) -> None:
        self.news: deque[Any] = deque()
        self._mail: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        first = pickle.dumps(letter)
        self._process = subprocess.Popen(
            command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends this process
        )
        atexit.register(self.end)
        self._mail.put(first)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def ended(self) -> bool:
        """It sends no more letters."""
        return not self._threads[1].is_alive()

    def tell(self, letter: object) -> None:
        """Sends it a letter, as it is now."""
        self._mail.put(pickle.dumps(letter))

    def _write(self) -> None:
        pipe: Any = self._process.stdin
        with contextlib.suppress(OSError, ValueError):  # it has ended
            while (letter := self._mail.get()) is not None:
                pipe.write(letter)
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


def first_letter() -> tuple[Any, deque[Any], Send]:
    """In the other process: its first letter, the later ones as they arrive, and the way to answer. It ends
    with its parent."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    first, heard = pickle.load(sys.stdin.buffer), deque[Any]()

    def send(letter: object) -> None:
        pickle.dump(letter, answers)
        answers.flush()

    def hear() -> None:
        try:
            while True:
                heard.append(pickle.load(sys.stdin.buffer))
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(0)

    threading.Thread(target=hear, daemon=True).start()
    return first, heard, send
