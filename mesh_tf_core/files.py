"""Files are whole or unchanged: they are written under a temporary name, flushed to the disk, and renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mesh_tf_core.arguments import PATH, check
from mesh_tf_core.errors import UserError

STREAMS = (1, 2)
"""Descriptors of a process's results and messages."""
OPEN = ("/dev/fd/", "/dev/std", "/proc/")
"""Names of open files: they are written to, and not replaced by another file."""
KEPT = 32
"""Characters of a file's name that its temporary name has too; a name has at most 255 bytes."""
PIPE = "it is a named pipe"
LONGEST = 200
"""Characters of a path that an error repeats."""
Content = str | bytes | Callable[[BinaryIO], object]
"""The content to write: text, as UTF-8, bytes, or a function that streams into an open file."""


def write_file(path: str | Path, content: Content, what: str = "the file") -> Path:
    """Writes a file so that whoever looks sees the old one or all of the new one; returns its path.

    A link stays a link: its target is replaced, if this user or root made the link. (The system's rule for
    links in shared folders, as /tmp, does not see a file that is renamed.) A file that is replaced keeps its
    mode. Devices, and files that this process prints to or has open, are written in place; a named pipe is
    refused, because it would wait for a reader. The file's folder is made if it is missing, but none above
    it.

    Args:
      what: name of the file in errors.

    Raises:
      UserError: it cannot be written; an old file is as it was.
    """
    check(what, path=(path, PATH))
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        _check_link(path)
        if (stream := _stream(path)) is not None:
            said = (sys.stdout, sys.stderr)[stream - 1]
            if said is not None:
                said.flush()
            _put(stream, data)
        elif _is_replaced(path):
            replace_file(Path(os.path.realpath(path)), data)
        else:
            handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _put(handle, data)
            finally:
                os.close(handle)
    except BrokenPipeError:
        raise  # a reader that has gone is no fault of the user's
    except UserError:
        raise  # of what is written
    except (OSError, ValueError) as error:
        raise unwritable(path, error, what) from None
    return Path(path)


def check_writable(path: str | Path, what: str = "the file") -> None:
    """UserError where `write_file` would be refused whatever the content; nothing is made or changed."""
    check(what, path=(path, PATH))
    try:
        _check_link(path)
        if _stream(path) is not None:
            return
        if not _is_replaced(path):
            if Path(path).is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
            _need(path, os.W_OK)
            return
        place = Path(os.path.realpath(path))
        if place.exists():
            _need(place, os.W_OK)
        folder = place.parent if place.parent.exists() else place.parent.parent
        os.stat(folder)
        _need(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise unwritable(path, error, what) from None


def unwritable(path: str | Path, error: Exception, what: str = "the file") -> UserError:
    """Turns the system's error about a file into the user's error."""
    said, todo = str(error), "choose another path"
    if isinstance(error, OSError) and error.strerror:
        said = error.strerror
    if isinstance(error, IsADirectoryError):
        said, todo = "it is a folder", "name a file"
    elif isinstance(error, FileNotFoundError) and not Path(path).parent.is_dir():
        said = f"there is no folder {str(Path(path).parent.parent)!r}"
        todo = "make the folder, or choose another path"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        todo = "free some space, or choose another path"
    return UserError(f"{what} {str(path)[:LONGEST]!r} cannot be written: {said}; {todo}")


def _check_link(path: str | Path) -> None:
    """PermissionError where another user's link says what is written."""
    if os.path.islink(path) and not os.path.abspath(path).startswith(OPEN):
        owner = os.lstat(path).st_uid
        if owner not in (os.geteuid(), 0):
            raise PermissionError(errno.EACCES, f"it is a symbolic link of another user (id {owner})")


def create(path: Path) -> BinaryIO:
    """A new file for writing, with access for the users of its folder only; OSError if its name exists, even
    as a link."""
    mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o666
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    if stat.S_IMODE(os.fstat(handle).st_mode) != mode:
        os.fchmod(handle, mode)
    return os.fdopen(handle, "wb")


def _stream(path: str | Path) -> int | None:
    """The stream of this process that is this file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    for number in STREAMS:
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(number)):
                return number
    return None


def _is_replaced(path: str | Path) -> bool:
    """Whether there is a file or nothing: something that can be renamed over."""
    if os.path.abspath(path).startswith(OPEN):
        return False
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return True
    if stat.S_ISFIFO(mode):
        raise OSError(errno.ESPIPE, PIPE)
    return stat.S_ISREG(mode)


def _need(path: str | Path, access: int) -> None:
    if not os.access(path, access):
        raise PermissionError(errno.EACCES, "permission denied")


def replace_file(place: Path, data: bytes | Callable[[BinaryIO], object]) -> None:
    """Writes a file beside its place, and renames it when all of it is on the disk: a link, a pipe or a
    device that lies there is replaced, not opened. OSError; an old file is as it was."""
    place.parent.mkdir(exist_ok=True)
    mode = None
    if place.exists():
        _need(place, os.W_OK)
        mode = stat.S_IMODE(place.stat().st_mode)
    part = place.with_name(f".{place.name[:KEPT]}.{secrets.token_hex(8)}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            if mode is not None:
                os.fchmod(handle, mode)
            _put(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_names(place.parent)


def _put(handle: int, data: bytes | Callable[[BinaryIO], object]) -> None:
    if callable(data):
        with open(handle, "wb", closefd=False) as file:
            data(file)
        return
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def sync_names(folder: Path) -> None:
    """Puts a folder's names on the disk, where its file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
