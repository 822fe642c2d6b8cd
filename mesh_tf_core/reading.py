"""The one door to files that are read. A file is a regular one, or one that this process has open, and has at
most so many bytes. Every fault of a file, or of its text, becomes one line in the same words."""

import contextlib
import errno
import gzip
import json
import os
import stat
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mesh_tf_core.arguments import PATH, check
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import OPEN, PIPE

MOST_BYTES = 1 << 24
"""The largest file, in bytes, that is read whole: parsing as much JSON takes about seven seconds."""
PIECE = 1 << 20
"""Bytes that are read at once."""
DEEPEST = 64
"""Levels of nesting that are read; a plan has at most ten."""
MOST_WORDS = 300
"""Characters of a parser's own words that an error repeats."""


def opened(path: str | Path) -> BinaryIO:
    """A file for reading, or an open file of this process, such as /dev/stdin.

    Raises:
      OSError: it cannot be read, or is a named pipe or a device, which may never end.
    """
    check("reading", path=(path, PATH))
    try:
        # A named pipe without a writer is opened at once, and then refused.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:
        raise OSError(errno.EINVAL, "it is not a valid file name", str(path)) from None
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not (stat.S_ISREG(mode) or os.path.abspath(path).startswith(OPEN)):
            kind = PIPE if stat.S_ISFIFO(mode) else "it is a device, not a regular file"
            raise OSError(errno.ESPIPE, kind, str(path))
        os.set_blocking(handle, True)
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The whole content of a file; OSError as `opened`, and if it has more than `most` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"".join(_pieces(file, most + 1)) if size <= most else b""
    if max(size, len(data)) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return data


def _pieces(file: BinaryIO, most: int) -> Iterator[bytes]:
    """At most so many bytes; read in pieces, because reading at once holds memory for all that may come."""
    while most and (piece := file.read(min(most, PIECE))):
        most -= len(piece)
        yield piece


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8."""
    return read_file(path, most).decode("utf-8-sig")


def read_json(path: str | Path, most: int = MOST_BYTES) -> Any:
    """The value in a JSON file."""
    return json_value(read_text(path, most))


def json_value(text: str) -> Any:
    """The value in a JSON text; RecursionError if it is deeper than readers may be."""
    found = json.loads(text)
    check_depth(found)
    return found


def check_depth(found: Any) -> None:
    """RecursionError if a value has more than `DEEPEST` levels, because readers may be recursive."""
    level = [found]
    for _ in range(DEEPEST):
        parts = (v for v in level if isinstance(v, Mapping | list | tuple))
        level = [inner for v in parts for inner in (v.values() if isinstance(v, Mapping) else v)]
    if level:
        raise RecursionError(f"more than {DEEPEST} levels")


@contextlib.contextmanager
def reading(what: str, again: str = "", error: type[UserError] = UserError) -> Iterator[None]:
    """Turns what the reading and parsing inside raises into one line.

    Args:
      what: name of the file in the line; again: the remedy, which ends it.
      error: the type of the error.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, RecursionError, MemoryError, ValueError) as fault:
        raise error(f"{what} {_said(fault)}{again and f'; {again}'}") from None


def _said(fault: Exception) -> str:
    """What a fault says about a file."""
    if isinstance(fault, gzip.BadGzipFile | EOFError | zlib.error):
        return f"is damaged or truncated gzip data ({fault})"
    if isinstance(fault, UnicodeDecodeError):
        return f"is not UTF-8 text (invalid byte at position {fault.start})"
    if isinstance(fault, json.JSONDecodeError):
        return f"is not valid JSON: {fault.msg} (line {fault.lineno}, column {fault.colno})"
    if isinstance(fault, tomllib.TOMLDecodeError):
        return f"is not a valid TOML file: {fault}"
    if isinstance(fault, RecursionError):
        return "is nested too deeply"
    if isinstance(fault, MemoryError):
        return "needs more memory than there is"
    if "int_max_str_digits" in str(fault):
        return "contains a number with too many digits"
    why = fault.strerror if isinstance(fault, OSError) else None
    return f"cannot be read: {why or ' '.join(str(fault).split())[:MOST_WORDS]}"
