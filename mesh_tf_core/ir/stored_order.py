"""The order in which the elements of a variable lie between steps, where that is not the model's.

With circular schedules of pipelines (`ops.ticks`), a stage has several chunks of layers that do not lie next
to each other. So that its device holds these and no others, layers lie stage after stage, and of each chunk
after chunk. Only devices know of this order: what is read, written, saved and begun with is in the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Interleaved:
    """The order of the first dimension, of P stages with R chunks of K elements each: chunk r of stage p is
    number r P + p of the model's."""

    stages: int
    rounds: int

    def runs(self, size: int, begin: int, count: int) -> Iterator[tuple[int, int]]:
        """What lies from one element on: equal runs of what the model has next to each other, each as
        (where it has them, how many).

        Args:
          size: of the dimension.
          begin, count: of a piece of it; begin is a multiple of count.
        """
        chunk = size // (self.stages * self.rounds)
        run = math.gcd(chunk, count)
        for at in range(begin, begin + count, run):
            stage, inside = divmod(at, chunk * self.rounds)
            number, element = divmod(inside, chunk)
            yield (number * self.stages + stage) * chunk + element, run
