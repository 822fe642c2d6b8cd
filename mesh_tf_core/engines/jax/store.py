"""JAX's key-value store as the processes of a job use it: their messages and heartbeats.

Whoever reaches the service can write there. Every message therefore has a code (`codes`), and messages
without a code of this job are refused.
"""

import json
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

from mesh_tf_core.engines.jax import watch
from mesh_tf_core.engines.jax.codes import SECRET, SECRET_FILE, Codes
from mesh_tf_core.errors import ClusterError

BEAT = 1.0
"""Seconds between two signs of life."""
ROOT = "layoutopt"
NOW = "now"
"""Key prefix under which every process reports its state, by rank."""
NUMBER = "number"
"""Where every process takes its number in the job, with a random text for the codes of this run."""
NAMED = 5
"""Refused keys that a process names, so that whoever writes them cannot fill its messages."""


def refused(text: str) -> None:
    """Reports which message was refused; the job continues."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


class JobStore:
    """The store, under keys of this library; `client` is JAX's. Its errors are RuntimeErrors.

    Args:
      codes: of the job's messages.
      say: called with refused messages.
    """

    def __init__(self, client: Any, codes: Codes | None = None, say: Callable[[str], None] = refused) -> None:
        self._client, self._codes, self._say = client, codes or Codes(), say
        self._topics = 0
        self._posts: list[list[str]] = []
        self._named: set[str] = set()
        self._lost: dict[str, float] = {}

    def put(self, key: str, value: str, again: bool = True) -> None:
        """Writes a value; over another one of this job if it may be written `again`."""
        place, sealed = f"{ROOT}/{key}", self._codes.sealed(key, value)
        try:
            self._client.key_value_set(place, sealed, allow_overwrite=again)
        except RuntimeError:
            if again or self._opened(key, self.raw(key)) is not None:
                raise
            self._client.key_value_set(place, sealed, allow_overwrite=True)

    def under(self, place: str) -> dict[str, str]:
        """The values that this job's processes wrote under a place, by the rest of their keys."""
        start = f"{ROOT}/{place}/"
        found = {key.removeprefix(start): message for key, message in self._client.key_value_dir_get(start)}
        opened = {key: self._opened(f"{place}/{key}", message) for key, message in found.items()}
        return {key: value for key, value in opened.items() if value is not None}

    def wanted(self, key: str) -> str | None:
        """A value that another process writes; None if it has not within `BEAT`, or the service is gone.

        Raises:
          ClusterError: the stored value was refused for `watch.SILENCE` seconds; it is lost.
        """
        found = self.raw(key)
        value = self._opened(key, found)
        if found is None or value is not None:
            self._lost.pop(key, None)
        else:  # if it was there too early, the right one will replace it
            if time.monotonic() - self._lost.setdefault(key, time.monotonic()) > watch.SILENCE:
                raise ClusterError(
                    f"{_why(key)}; the right message did not arrive, so the job cannot continue"
                )
            time.sleep(BEAT / 10)
        return value

    def begin_run(self, processes: int) -> None:
        """Waits until every process has its rank, and derives this run's codes from the random numbers of
        all."""
        nonces = []
        for number in range(processes):
            while (found := self.wanted(f"{NUMBER}/{number}")) is None:
                pass
            nonces.append(found)
        self._codes.begin(nonces)

    def take_number(self, number: int) -> None:
        """Writes that a process has this number; RuntimeError if another one has it."""
        self.put(f"{NUMBER}/{number}", secrets.token_hex(16), again=False)

    def raw(self, key: str) -> str | None:
        """The value under a key, whoever wrote it; None if there is none."""
        found = tried(lambda: self._client.blocking_key_value_get(f"{ROOT}/{key}", int(BEAT * 1000)))
        return None if found is None else str(found)

    def _opened(self, key: str, message: str | None) -> str | None:
        """The text of a message; None, and said once, if no process of this job wrote it there."""
        value = None if message is None else self._codes.opened(key, message)
        if message is not None and value is None and key not in self._named and len(self._named) < NAMED:
            self._named.add(key)
            self._say(f"{_why(key)}; the message is ignored")
        return value

    def drop(self, key: str) -> None:
        """Removes a value that no process will read."""
        tried(lambda: self._client.key_value_delete(f"{ROOT}/{key}"))

    def topic(self, what: str) -> str:
        """A new name under which threads of this job's processes post, the same in all. All processes must
        call it in the same order, each after it has finished the previous topic."""
        self._posts.append([])
        if len(self._posts) > 2:  # all are done with the last but one: this process has heard all of the last
            for key in self._posts.pop(0):
                self.drop(key)
        self._topics += 1
        return f"{what} {self._topics}"

    def post(self, key: str, value: Any) -> None:
        """Stores a JSON value under a key of the newest topic."""
        self._posts[-1].append(key)
        self.put(key, json.dumps(value))


def _why(key: str) -> str:
    return (
        f"the message {key[:60]!r} cannot be authenticated: a process outside the job wrote to the job's "
        f"coordinator, or the job's processes have different secrets; set the same {SECRET} or {SECRET_FILE} "
        "in the environment of every process"
    )


def tried(call: Callable[[], Any]) -> Any:
    """None where the service refuses or does not answer: somebody else finds out why."""
    try:
        return call()
    except RuntimeError:
        return None
