"""The order in which the layers of a variable lie between steps, where that is not the model's.

A stage of a pipeline (`ir.schedules`) with several virtual stages has layers that do not lie next to each
other. So that its device holds these and no others, layers lie stage after stage, and in each virtual stage
after virtual stage. Where some of these have a layer less, they are padded with zeros. Only devices use this
order: values that are read, written, saved and initialised have the model's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mesh_tf_core.errors import UserError

PADDING = -1
UNEQUAL = re.compile(r"|(first|last|first=\d{1,4}:last)=\d{1,4}|layers=\d{1,4}(\+\d{1,4})*")
"""The layers of the first or last stage, or of every virtual stage in the model's order."""


@dataclass(frozen=True)
class Interleaved:
    """The order of the first dimension, of P stages with R virtual stages each: virtual stage r of stage p is
    number r P + p of the model's; with `turns`, every second round runs up the stages; `mirrored`, a stage
    also has a copy of the layers of the one as far from the other end. Stages without a full number of layers
    are at both ends, which also compute embedding and head; or where the layers of stages are given
    (`unequal`, as `UNEQUAL`)."""

    stages: int
    rounds: int
    unequal: str = ""
    turns: bool = False
    mirrored: bool = False

    @property
    def chunks(self) -> int:
        """Virtual stages of a stage, with copies."""
        return self.rounds * (1 + self.mirrored)

    @property
    def virtual(self) -> np.ndarray:
        """[stage, chunk]: which virtual stage it is."""
        stage, chunk = np.indices((self.stages, self.chunks))
        up = (chunk % 2 == 1) & (self.turns or self.mirrored)
        return chunk % self.rounds * self.stages + np.where(up, self.stages - 1 - stage, stage)

    @property
    def given(self) -> dict[str, int]:
        """The layers of the first and the last stage, where these are given."""
        said = self.unequal if self.unequal.startswith(("first", "last")) else ""
        return {name: int(n) for name, n in (part.split("=") for part in said.split(":") if part)}

    def counts(self, layers: int) -> np.ndarray:
        """The layers of each virtual stage, in the model's order; UserError if those that are given are not
        all layers."""
        parts = self.stages * self.rounds
        if self.unequal.startswith("layers="):
            found = np.array([*map(int, self.unequal.removeprefix("layers=").split("+"))])
        elif self.given:
            found = self._between_ends(layers)
        else:
            both = np.stack([np.arange(parts)[::-1], np.arange(parts)], axis=1).reshape(-1)
            found = np.full(parts, -(-layers // parts))
            found[both[: -layers % parts]] -= 1
        if len(found) != parts or found.sum() != layers or found.min() < 0:
            raise UserError(f"{self.unequal}: {self._unfit(layers, found)}")
        return found

    def _unfit(self, layers: int, found: np.ndarray) -> str:
        """Why the layers that are given cannot be those of the stages, and which can."""
        each = f" of {self.rounds} virtual stages" if self.rounds > 1 else ""
        if not self.given:
            return (
                f"these are {found.sum()} layers in {len(found)} parts; the model has {layers} layers for "
                f"{self.stages} stages{each}; write {self.stages * self.rounds} numbers with the sum {layers}"
            )
        name, (old, *_) = next(iter(self.given)), self.given.values()
        texts = (self.unequal.replace(f"{name}={old}", f"{name}={n}") for n in range(layers))
        others = (replace(self, unequal=text) for text in texts)
        fits = [o for o in others if (own := o._between_ends(layers)).sum() == layers and own.min() >= 0]
        near = sorted(fits, key=lambda o: (abs(o.given[name] - old), o.given[name]))[:2]
        do = " or ".join(o.unequal for o in near) or "the layers of every stage, layers=N+N+..."
        left, many = layers - sum(self.given.values()), self.stages - len(self.given)
        return (
            f"it leaves {left} of the model's {layers} layers to the other {many} of {self.stages} stages"
            f"{each}, which share them equally; write {do}"
        )

    def _between_ends(self, layers: int) -> np.ndarray:
        """Stages between those that are given share the other layers equally."""
        ends = {"first": 0, "last": self.stages - 1}
        given = {ends[name]: number for name, number in self.given.items()}
        each = (layers - sum(given.values())) // max(self.stages - len(given), 1)
        own = np.array([given.get(stage, each) // self.rounds for stage in range(self.stages)])
        return own[np.argsort(self.virtual[:, : self.rounds], axis=None) // self.rounds]

    def of_stages(self, layers: int) -> np.ndarray:
        """[stage, chunk]: their layers."""
        return self.counts(layers)[self.virtual]

    def size(self, layers: int) -> int:
        """The number of places that these layers take."""
        return int(self.counts(layers).max()) * self.stages * self.chunks

    def moves(self, layers: int) -> bool:
        """True if layers lie otherwise than the model has them."""
        return self.chunks > 1 or self.lacks(layers) > 0

    def lacks(self, layers: int) -> int:
        """How many places have no layer."""
        return int(np.count_nonzero(self.numbers(layers) == PADDING))

    def numbers(self, layers: int) -> np.ndarray:
        """[stage, place]: the model's number of the layer at that place; PADDING if there is none."""
        counts = self.counts(layers)
        begins, inside = np.cumsum(counts) - counts, np.arange(counts.max())
        found = np.where(inside < counts[:, None], begins[:, None] + inside, PADDING)
        return found[self.virtual].reshape(self.stages, -1)

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
