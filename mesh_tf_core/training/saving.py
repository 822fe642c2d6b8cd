"""Checkpoints written while the training goes on."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh_tf_core.training import checkpoint


class Saver:
    """Writes checkpoints, one at a time, each in a thread of its own.

    The process's end waits for the thread. An error in it is raised by the next `save` or `wait`; if neither
    comes, it is printed when the process ends.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._registered = False

    def save(
        self, directory: str | Path, step: int, variables: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        """Starts to write a checkpoint, once the one before is written.

        Args:
          variables: see `checkpoint.write`; read in the thread, so they must not change.

        Raises:
          UserError: the directory cannot be written, or another job writes there.
        """
        self.wait()
        own = contextlib.ExitStack()
        own.enter_context(checkpoint.owned(directory))
        if not self._registered:
            atexit.register(self._report)
            self._registered = True

        def run() -> None:
            try:
                with own:
                    checkpoint.write(directory, step, variables, extra)
            except OSError as error:
                self._error = checkpoint.unwritable(directory, error)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name=f"checkpoint of step {step}")
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is left to write; raises the error of the last writing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _report(self) -> None:
        if self._error is not None:
            print(f"error: the last checkpoint was not written: {self._error}", file=sys.stderr)
