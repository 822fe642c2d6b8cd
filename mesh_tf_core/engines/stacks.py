"""Values stacked over a loop's iterations, kept as their parts: the loop that reads them again takes a part,
no copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Pieces = list[Any]


class Stack:
    """One list of pieces (a piece per device) per iteration; stacked into one tensor per device when first
    needed.

    Args:
      join: stacks the parts of one device: (parts, rank) -> tensor.
    """

    def __init__(self, parts: Sequence[Pieces], join: Callable[[Pieces, int], Any]) -> None:
        self.parts, self.join = list(parts), join
        self._whole: Pieces | None = None

    def map(self, fn: Callable[[Pieces], Pieces]) -> Stack:
        return Stack([fn(part) for part in self.parts], self.join)

    def whole(self) -> Pieces:
        """One stacked tensor per device; devices whose parts are the same tensors share it."""
        if self._whole is None:
            made: dict[tuple[Any, ...], Any] = {}
            self._whole = []
            for rank in range(len(self.parts[0])):
                key = tuple(part[rank] for part in self.parts)
                if key not in made:
                    made[key] = self.join(list(key), rank)
                self._whole.append(made[key])
        return self._whole


def whole(pieces: Pieces | Stack) -> Pieces:
    """The pieces of a value, stacked if it is still in parts."""
    return pieces.whole() if isinstance(pieces, Stack) else pieces
