"""One job writes into a directory of checkpoints: a lock that ends with the process that holds it.

It is the system's lock (flock) of the file `.lock` there, in which the holder says who it is. The kernel
takes it away when the holder ends, however it ends. Of the processes of one job only the one that writes
takes it; whoever only reads needs none. A process takes it as often as it likes: its trainers are one job.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from mesh_tf_core.errors import UserError

FILE = ".lock"
TAKEN = (errno.EAGAIN, errno.EACCES)
"""What the system says if another process holds the lock."""

_guard = threading.Lock()
_handles: dict[str, int] = {}
_counts: dict[str, int] = {}


@contextlib.contextmanager
def locked(directory: str | Path, what: str = "checkpoint") -> Iterator[str]:
    """Within it, no other process may write checkpoints there. Yields why it cannot be locked, or nothing:
    some network file systems have no locks.

    Args:
      what: messages call it so.

    Raises:
      UserError: another job writes there; which one.
      OSError: the directory cannot be written.
    """
    place = os.path.realpath(directory)
    with _guard:
        trouble = "" if place in _handles else _take(place, f"{what} {str(directory)!r}")
        _counts[place] = _counts.get(place, 0) + 1
    try:
        yield trouble
    finally:
        with _guard:
            _counts[place] -= 1
            if not _counts[place]:
                del _counts[place]
                if place in _handles:
                    os.close(_handles.pop(place))


def _take(place: str, called: str) -> str:
    """Locks, and writes down who did; returns why there is no lock."""
    handle = os.open(os.path.join(place, FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(handle)
        os.close(handle)
        if error.errno in TAKEN:
            raise UserError(
                f"{called} is in use: {holder} writes there; wait for its end, or give another directory"
            ) from None
        return f"{called} cannot be locked here ({error.strerror}); see to it that no other job writes there"
    _handles[place] = handle
    own = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.datetime.now().isoformat(" ", "seconds"),
    }
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(own).encode(), 0)
    return ""


def _holder(handle: int) -> str:
    """Who holds the lock, as it says itself."""
    try:
        found = json.loads(os.pread(handle, 1024, 0))
        return f"process {int(found['pid'])} on {found['host']!s:.80} (since {found['since']!s:.19})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _forget() -> None:
    """A forked child, as those that load data, is not the holder and must not outlive it as one."""
    global _guard
    _guard = threading.Lock()
    for handle in _handles.values():
        with contextlib.suppress(OSError):
            os.close(handle)
    _handles.clear()
    _counts.clear()


os.register_at_fork(after_in_child=_forget)
