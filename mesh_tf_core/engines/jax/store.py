"""JAX's key-value store as the processes of a job use it: what they post, and that they live."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

BEAT = 1.0
"""Seconds between two signs of life."""
ROOT = "layoutopt"
NOW = "now"
"""Where every process says under its number that it lives and what it does."""


class Store:
    """The store, under keys of ours; `client` is JAX's. Its errors are RuntimeErrors."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._topics = 0
        self._posts: list[list[str]] = []

    def put(self, key: str, value: str, again: bool = True) -> None:
        """Writes a value; over another one if it may be written `again`."""
        self._client.key_value_set(f"{ROOT}/{key}", value, allow_overwrite=again)

    def under(self, place: str) -> dict[str, str]:
        """What lies under a place, by the rest of its keys."""
        start = f"{ROOT}/{place}/"
        return {key.removeprefix(start): value for key, value in self._client.key_value_dir_get(start)}

    def wanted(self, key: str) -> str | None:
        """A value that another process writes; None if it has not within `BEAT`, or the service is gone."""
        found = tried(lambda: self._client.blocking_key_value_get(f"{ROOT}/{key}", int(BEAT * 1000)))
        return None if found is None else str(found)

    def drop(self, key: str) -> None:
        """Takes a value away that nobody will read."""
        tried(lambda: self._client.key_value_delete(f"{ROOT}/{key}"))

    def topic(self, what: str) -> str:
        """A new name under which threads of this job's processes post, the same in all. All must ask for it
        in the same order, each when it is done with the one before."""
        self._posts.append([])
        if len(self._posts) > 2:  # all are done with the last but one: this process has heard all of the last
            for key in self._posts.pop(0):
                self.drop(key)
        self._topics += 1
        return f"{what} {self._topics}"

    def post(self, key: str, value: Any) -> None:
        """Leaves what JSON holds under a key of the newest topic."""
        self._posts[-1].append(key)
        self.put(key, json.dumps(value))


def tried(call: Callable[[], Any]) -> Any:
    """None where the service refuses or does not answer: somebody else finds out why."""
    try:
        return call()
    except RuntimeError:
        return None
