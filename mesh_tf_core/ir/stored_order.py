"""The order in which the layers of a variable lie between steps, where that is not the model's.

A stage of a pipeline (`ir.schedules`) with several virtual stages has layers that do not lie next to each
other. So that its device holds these and no others, layers lie stage after stage, and in each virtual stage
after virtual stage. Where some of these have a layer less, they are padded with zeros. Only devices use this
order: values that are read, written, saved and initialised have the model's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PADDING = -1


@dataclass(frozen=True)
class Interleaved:
    """The order of the first dimension, of P stages with R virtual stages each: virtual stage r of stage p is
    number r P + p of the model's. Stages without a full number of layers are at both ends, which also compute
    embedding and head."""

    stages: int
    rounds: int

    def size(self, layers: int) -> int:
        """The number of places that these layers take."""
        parts = self.stages * self.rounds
        return -(-layers // parts) * parts

    def moves(self, layers: int) -> bool:
        """True if layers lie otherwise than the model has them."""
        return self.rounds > 1 or self.size(layers) != layers

    def numbers(self, layers: int) -> np.ndarray:
        """[stage, place]: the model's number of the layer at that place; PADDING if there is none."""
        parts, lie = self.stages * self.rounds, self.size(layers)
        both = np.stack([np.arange(parts)[::-1], np.arange(parts)], axis=1).reshape(-1)
        counts = np.full(parts, lie // parts)
        counts[both[: lie - layers]] -= 1
        begins = np.cumsum(counts) - counts
        inside = np.arange(lie // parts)
        found = np.where(inside < counts[:, None], begins[:, None] + inside, PADDING)
        return found.reshape(self.rounds, self.stages, -1).transpose(1, 0, 2).reshape(self.stages, -1)

    def runs(self, layers: int, begin: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The runs of layers, contiguous in the model, that follow each other in storage from one place on.

        Args:
          begin, count: of the places.

        Returns:
          For each run: its first layer, the number of layers, and their distance behind `begin`.
        """
        numbers = self.numbers(layers).reshape(-1)[begin : begin + count]
        breaks = np.flatnonzero((np.diff(numbers) != 1) | (numbers[:-1] == PADDING)) + 1
        for places in np.split(np.arange(count), breaks):
            if numbers[places[0]] != PADDING:
                yield int(numbers[places[0]]), len(places), int(places[0])
