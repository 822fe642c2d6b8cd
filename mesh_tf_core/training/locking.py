"""One job writes into a directory of checkpoints: a lock that ends with the process that holds it.

It is the system's lock (flock) of the file `.lock` there, in which the holder writes its name. The kernel
takes it away when the holder ends, however it ends. Only the writing process of a job takes the lock;
processes that only read need none. A process takes it as often as it likes: its trainers are one job.

The library filelock (4.3.1) is not used: it does not report who holds the lock, does not notice that its file
was removed and another job has locked the next one, and accepts a file that has a second name.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from mesh_tf_core.errors import UserError

FILE = ".lock"
TAKEN = (errno.EAGAIN, errno.EACCES)
"""The system's error numbers if another process holds the lock."""
FOREIGN = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
"""The system's error numbers if the lock's name is a link, a folder, or a special file without a device."""
LONGEST = 1024
"""Bytes that are read of a lock's file."""

_guard = threading.Lock()
_handles: dict[str, int] = {}
_counts: dict[str, int] = {}


@contextlib.contextmanager
def locked(directory: str | Path, what: str = "checkpoint") -> Iterator[str]:
    """Within it, no other process may write checkpoints there. Yields a problem, or nothing: some network
    file systems have no locks, and the lock file of this process may have been removed.

    Args:
      what: the name in messages.

    Raises:
      UserError: another job writes there, which is named; or the file with the lock's name is not a lock.
      OSError: the directory cannot be written.
    """
    place, called = os.path.realpath(directory), f"{what} {str(directory)!r}"
    with _guard:
        if place not in _handles:
            trouble = _take(place, called)
        else:
            trouble = "" if _is_in_place(place, _handles[place]) else _take_again(place, called)
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
    while True:
        handle = _opened(place, called)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(handle)
            os.close(handle)
            if error.errno in TAKEN:
                raise UserError(
                    f"{called} is in use by {holder}; wait until that process ends, or give another directory"
                ) from None
            return (
                f"{called} cannot be locked on this file system ({error.strerror}); make sure that no "
                "other job writes to it"
            )
        if _is_in_place(place, handle):
            break
        os.close(handle)  # it was removed in between: the next one to come would lock another file
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


def _take_again(place: str, called: str) -> str:
    """Takes the lock that was removed while this process held it, unless another job has; says so."""
    lost, removed = (
        _handles.pop(place),
        f"{called}: its lock file {FILE} was removed while this job was running",
    )
    try:
        trouble = _take(place, called)
    except UserError as error:
        _handles[place] = lost
        raise UserError(f"{removed}; now {error}") from None
    except BaseException:
        _handles[place] = lost
        raise
    os.close(lost)
    return (
        trouble
        or f"{removed} and has been created again; do not remove the file, because it keeps other jobs out"
    )


def _opened(place: str, called: str) -> int:
    """The lock's file, made if need be; UserError if what has its name cannot be one that we made."""
    path = os.path.join(place, FILE)
    try:
        # Without a link at its end, and without waiting for the other end of a pipe.
        handle = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666
        )
    except OSError as error:
        if error.errno in FOREIGN:
            raise _foreign(called, "a symbolic link" if os.path.islink(path) else "no regular file") from None
        raise
    found, kind = os.fstat(handle), ""
    if not stat.S_ISREG(found.st_mode):
        kind = "no regular file"
    elif found.st_nlink > 1:
        kind = "a file with a second hard link"
    elif not _is_ours(os.pread(handle, LONGEST, 0)):
        kind = "a file of another program"
    if kind:
        os.close(handle)
        raise _foreign(called, kind)
    return handle


def _foreign(called: str, kind: str) -> UserError:
    return UserError(
        f"{called}: {FILE}, the name of the lock file, is {kind}; remove {FILE}, or give another directory"
    )


def _is_ours(content: bytes) -> bool:
    """Whether a lock's file holds what we write, or nothing, as after a crash."""
    try:
        return not content.strip(b"\0 \n") or "pid" in dict(json.loads(content))
    except (ValueError, TypeError):
        return False


def _is_in_place(place: str, handle: int) -> bool:
    """Whether an open file still is the lock's."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(os.path.join(place, FILE)))
    except OSError:
        return False


def _holder(handle: int) -> str:
    """Who holds the lock, as it says itself."""
    try:
        found = json.loads(os.pread(handle, LONGEST, 0))
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
