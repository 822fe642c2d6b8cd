"""Codes by which the processes of a job authenticate messages: HMAC-SHA256 under a secret of the job.

`launch` makes a secret for every start of its workers. On several hosts the scheduler or the user gives all
processes the same one, in a variable or in a file. Without a secret the codes use an empty one: they still
reject a process with another secret, but do not keep anyone out.
"""

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Sequence

from mesh_tf_core.errors import UserError
from mesh_tf_core.reading import opened

SECRET, SECRET_FILE = "LAYOUTOPT_JOB_SECRET", "LAYOUTOPT_JOB_SECRET_FILE"
SHORTEST, LONGEST = 16, 4096
"""Bytes of a secret."""
DIGITS = 2 * hashlib.sha256().digest_size
"""Length of a code, which precedes the text of its message."""


class Codes:
    """Makes and checks the codes of messages.

    A code covers the key of its message, so that no message can replace another. After `begin` it covers the
    run too, so that no message of an earlier run with the same secret passes for one of this run.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = self._run = secret

    def begin(self, nonces: Sequence[str]) -> None:
        """Makes codes of one run from now on; `nonces`: a random text of each of its processes, in the order
        of their numbers. Each process adds its own random number, so that no recorded run can be replayed."""
        self._run = _digest(self._secret, json.dumps(nonces))

    def sealed(self, key: str, text: str) -> str:
        """The message with its code before it."""
        return self._code(key, text) + text

    def opened(self, key: str, message: str) -> str | None:
        """The text of a message; None if its code is wrong or missing."""
        code, text = message[:DIGITS], message[DIGITS:]
        right = hmac.compare_digest(code.encode("utf-8", "replace"), self._code(key, text).encode())
        return text if right else None

    def _code(self, key: str, text: str) -> str:
        return _digest(self._run, f"{len(key)} {key}{text}").hex()


def _digest(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode("utf-8", "surrogatepass"), "sha256")


def given_secret() -> bytes:
    """The secret that the environment gives this process; empty if it gives none.

    Raises:
      UserError: the secret is too short, is given twice, or is in a file that cannot be read or that others
        can read.
    """
    text, path = os.environ.get(SECRET, ""), os.environ.get(SECRET_FILE, "")
    if text and path:
        raise UserError(f"cluster: both {SECRET} and {SECRET_FILE} are set; set only one of them")
    secret, source = text.encode("utf-8", "surrogateescape"), SECRET
    if path:
        secret, source = _read_private(path), f"{SECRET_FILE} {path[:200]!r}"
    if (text or path) and not SHORTEST <= len(secret) <= LONGEST:
        raise UserError(
            f"cluster: the secret in {source} has {len(secret)} bytes, but it must have {SHORTEST} to "
            f"{LONGEST}; make one with `openssl rand -hex 32` and give all processes the same"
        )
    return secret


def _read_private(path: str) -> bytes:
    """All of a file that nobody else can read, without white space around it."""
    called = f"cluster: {SECRET_FILE} {path[:200]!r}"
    try:
        with opened(path) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{called} is not a regular file; name a file that contains the secret")
            if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
                raise UserError(
                    f"{called} has owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}, so "
                    "other users can read or change it; make yourself its owner (chown) and set its "
                    "mode to 0600 (chmod)"
                )
            return file.read(LONGEST + 2).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{called} cannot be read: {reason}; name a readable file") from None
