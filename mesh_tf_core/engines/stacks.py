"""Values stacked over a loop's iterations, kept as their parts: the loop that reads them again takes a part,
no copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

DevicePieces = list[Any]


class StackedPieces:
    """One list of pieces (a piece per device) per iteration; stacked into one tensor per device when first
    needed.

    Args:
      join: stacks the parts of one device: (parts, rank) -> tensor.
    """

    def __init__(self, parts: Sequence[DevicePieces], join: Callable[[DevicePieces, int], Any]) -> None:
        self.parts, self.join = list(parts), join
        self._whole: DevicePieces | None = None

    def map(self, fn: Callable[[DevicePieces], DevicePieces]) -> StackedPieces:
        return StackedPieces([fn(part) for part in self.parts], self.join)

    def whole(self) -> DevicePieces:
        """One stacked tensor per device; devices with the same parts share it."""
        if self._whole is None:
            made: dict[tuple[Any, ...], Any] = {}
            self._whole = []
            for rank in range(len(self.parts[0])):
                key = tuple(part[rank] for part in self.parts)
                if key not in made:
                    made[key] = self.join(list(key), rank)
                self._whole.append(made[key])
        return self._whole


def whole(pieces: DevicePieces | StackedPieces) -> DevicePieces:
    """The pieces of a value, stacked if it is still in parts."""
    return pieces.whole() if isinstance(pieces, StackedPieces) else pieces
