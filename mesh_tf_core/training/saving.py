"""Checkpoints that are written during training, by one process or by all of a job, each its own pieces."""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesh_tf_core.engines.pieces import VariablePiece
from mesh_tf_core.errors import UserError
from mesh_tf_core.training import checkpoint, folders

if TYPE_CHECKING:
    from mesh_tf_core.engines import Cluster


def check_position(position: Any) -> None:
    """Raises a UserError unless JSON can store a position of the data."""
    try:
        json.dumps(position)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the data's get_state() returned {position!r}, which cannot be stored in a checkpoint "
            f"({error}); return only JSON values (dicts, lists, strings, numbers, bools, None)"
        ) from None


class Saver:
    """Writes checkpoints, one at a time, each in a separate thread.

    The process's end waits for the thread. An error in it is raised by the next `save` or `wait`; if neither
    follows, it is printed when the process ends.

    Args:
      cluster: processes that write together; every one of them calls the same methods in the same order.
      mode: of the folders, and of the files in them without the right to execute; None: decided by the umask.

    Raises:
      UserError: the mode keeps the owner out.
    """

    def __init__(self, cluster: Cluster | None = None, mode: int | None = None) -> None:
        if mode is not None:
            folders.check_mode(mode, f"{mode:#o}")
        self._cluster, self.mode = cluster, mode
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._registered = False

    def save(
        self, directory: str | Path, step: int, pieces: Mapping[VariablePiece, Any], extra: Mapping[str, Any]
    ) -> None:
        """Starts to write a checkpoint, once the one before is written.

        Args:
          pieces: see `checkpoint.write`; read in the thread, so they must not change. Of several processes
            each has its own.

        Raises:
          UserError: the directory cannot be written, or another job writes there.

        Warns:
          CheckpointWarning: the lock was removed during the training.
        """
        self.wait()
        cluster = self._cluster
        with contextlib.ExitStack() as stack:
            if cluster is None or cluster.is_writer:
                trouble = stack.enter_context(checkpoint.owned(directory, self.mode))
                if trouble:
                    warnings.warn(trouble, checkpoint.CheckpointWarning, stacklevel=2)
            own = stack.pop_all()
        if not self._registered:
            atexit.register(self._report)
            if cluster is not None:
                cluster.before_end(self.wait)
            self._registered = True
        write: Callable[[], object]
        if cluster is None:
            write = lambda: checkpoint.write(directory, step, pieces, extra, mode=self.mode)  # noqa: E731
        else:
            together = _JointCheckpoint(cluster, cluster.store.topic("checkpoint"), directory, self.mode)
            write = lambda: together.write(step, pieces, extra)  # noqa: E731

        def run() -> None:
            try:
                with own:
                    write()
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


class _JointCheckpoint:
    """One checkpoint of several processes: the writer (worker 0) makes a folder, each writes its file into
    it, and when all have, the writer gives it its name. Whoever fails tells the others. Each believes the
    writer no more than the folder's name below its own directory.

    Args:
      topic: under which they post what they have done.
      mode: of the folder.
    """

    def __init__(self, cluster: Cluster, topic: str, directory: str | Path, mode: int | None) -> None:
        self._cluster, self._topic, self._directory, self._mode = cluster, topic, directory, mode

    def write(self, step: int, pieces: Mapping[VariablePiece, Any], extra: Mapping[str, Any]) -> None:
        """Returns when the checkpoint has its name.

        Raises:
          OSError: this process cannot write.
          UserError: another one cannot.
          ClusterError: another one was lost.
        """
        if self._cluster.is_writer:
            with self._told("end"):
                self._lead(step, pieces, extra)
        else:
            name = self._heard("folder")
            with contextlib.suppress(UserError, OSError), self._told(str(self._cluster.index)) as said:
                folder = folders.begun(self._directory, step, *name)
                if not folder.is_dir() or folder.is_symlink():
                    raise UserError(
                        f"{self._cluster.name(self._cluster.index)} cannot find {str(folder)!r}, which "
                        f"{self._cluster.name(0)} created; use a checkpoint directory that all machines share"
                    )
                said += checkpoint.write_pieces(folder, self._cluster.index, pieces)
            # The writer says what went wrong first: a folder is also gone because it could not write.
            self._heard("end")

    def _lead(self, step: int, pieces: Mapping[VariablePiece, Any], extra: Mapping[str, Any]) -> None:
        with contextlib.ExitStack() as stack:
            with self._told("folder") as said:
                folder = stack.enter_context(checkpoint.beginning(self._directory, step, self._mode))
                said.append(folder.name)
            others = list(range(1, self._cluster.processes))
            stack.callback(self._settled, others)  # before the folder goes: a late file would make it stay
            written = checkpoint.write_pieces(folder, 0, pieces)
            while others:
                written += self._heard(str(others.pop()))
            checkpoint.finish(folder, step, written, extra)

    def _settled(self, others: list[int]) -> None:
        """Returns when the processes `others` write no more."""
        while others:
            with contextlib.suppress(Exception):  # a loss is said elsewhere
                self._heard(str(others.pop()))

    @contextlib.contextmanager
    def _told(self, what: str) -> Any:
        """Posts what is put into the list, or the error that kept this process from it."""
        said: list[Any] = []
        try:
            yield said
        except Exception as error:
            text = checkpoint.unwritable(self._directory, error) if isinstance(error, OSError) else error
            with contextlib.suppress(Exception):  # the others may be gone
                self._cluster.post(f"{self._topic}/{what}", {"error": str(text)})
            raise
        self._cluster.post(f"{self._topic}/{what}", {"said": said})

    def _heard(self, what: str) -> Any:
        found = self._cluster.fetch(f"{self._topic}/{what}")
        if "error" in found:
            raise UserError(found["error"])
        return found["said"]
