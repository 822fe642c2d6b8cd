"""The two streams of a command as they may be: closed, full, or of fewer characters than our text has.

A result that cannot be printed is an error of one line. Messages that cannot be printed are dropped: they
must not keep a result from its place.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import IO

OUT, ERR = 1, 2
PLAIN = dict(zip("×µ–−—─“”’", 'xu----""\'', strict=True))
PLAIN |= {"±": "+-", "→": "->", "≥": ">=", "≤": "<=", "…": "..."}
"""Replacements of special characters in ASCII."""
HANDLER = "layoutopt.plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What is written for characters that a stream does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = ""
    for character in error.object[error.start : error.end]:
        near = PLAIN.get(character) or unicodedata.normalize("NFKD", character)
        found += near if near.isascii() else near.encode("ascii", "ignore").decode() or "?"
    return found, error.end


codecs.register_error(HANDLER, _plain)


@contextlib.contextmanager
def open_streams() -> Iterator[None]:
    """Within it both streams are there and take every character; after it the interpreter's own flush at its
    end cannot fail any more."""
    if sys.stdout is None:
        _reserve(OUT, os.O_RDONLY)  # what is written is refused, and no other file gets this number
        sys.stdout = open(OUT, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        _reserve(ERR, os.O_WRONLY)
        sys.stderr = open(ERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                let_go(stream)


def has_unicode(stream: IO[str]) -> bool:
    """True if a stream takes every character."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def let_go(stream: IO[str]) -> None:
    """Drops the text that a stream could not write, and all later text."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _reserve(number: int, access: int) -> None:
    handle = os.open(os.devnull, access)
    if handle != number:
        os.dup2(handle, number)
        os.close(handle)
