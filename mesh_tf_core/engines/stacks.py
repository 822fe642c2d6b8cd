"""Values stacked over a loop's iterations, kept as their parts: the loop that reads them again takes a part, no copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Stack:
    """One list of pieces (a piece per device) per iteration; stacked into one tensor per device when first needed."""

    def __init__(self, parts: Sequence[list[Any]]) -> None:
        self.parts = list(parts)
        self._whole: list[Any] | None = None

    def map(self, fn: Callable[[list[Any]], list[Any]]) -> Stack:
        return Stack([fn(part) for part in self.parts])

    def whole(self, devices: Sequence[str]) -> list[Any]:
        """One stacked tensor per device; devices whose parts are the same tensors share it."""
        import tensorflow as tf

        if self._whole is None:
            made: dict[tuple[int, ...], Any] = {}
            self._whole = []
            for rank, device in enumerate(devices):
                key = tuple(id(part[rank]) for part in self.parts)
                if key not in made:
                    with tf.device(device):
                        made[key] = tf.stack([part[rank] for part in self.parts])
                self._whole.append(made[key])
        return self._whole


def whole(pieces: Any, devices: Sequence[str]) -> list[Any]:
    """The pieces of a value, stacked if it is still in parts."""
    return pieces.whole(devices) if isinstance(pieces, Stack) else pieces
