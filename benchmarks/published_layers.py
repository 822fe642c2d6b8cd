"""What the 720 published steps of vTrain on one node consist of.

They are no 720 independent measurements, but sums of a few numbers per hidden size H:
  (1) step = parts (layers a[t, m] + b[t, m]) + layers c[t, d] + e[t, d]
t ways of tensor, d of data parallelism, micro batch m: a layer and everything else of one microbatch, and
what follows once a step. `layers` solves (1) by least squares, and says how far steps lie from it. The times
of a layer are the data that predictions of these tables can be held against.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.published_rows import Priced

NAME = re.compile(r"(\d+)x(\d+), \d+ GPUs, batch (\d+): tensor (\d+), data (\d+), micro batch (\d+)")
MICRO = (1, 2, 4, 8)


@dataclass(frozen=True)
class Layers:
    """Milliseconds of a layer, by (hidden size, ways of tensor parallelism, micro batch).

    Attributes:
      published, predicted: a[t, m] of equation (1).
      off: mean error of equation (1) on the published steps.
    """

    published: dict[tuple[int, int, int], float]
    predicted: dict[tuple[int, int, int], float]
    off: float


def layers(rows: Sequence[Priced]) -> Layers:
    """Solves equation (1) for the published and for the predicted steps; other rows than vTrain's of one node
    are left out."""
    published: dict[tuple[int, int, int], float] = {}
    predicted: dict[tuple[int, int, int], float] = {}
    own = [p for p in rows if "vtrain" in p.run.table and "multi" not in p.run.table and p.run.stages == 1]
    found = [(p, tuple(map(int, NAME.match(p.run.name).groups()))) for p in own]  # type: ignore[union-attr]
    off = []
    for hidden in sorted({sizes[0] for _, sizes in found}):
        here = [(p, sizes[1:]) for p, sizes in found if sizes[0] == hidden]
        index: dict[tuple[str, int, int], int] = {}
        terms = [_terms(*sizes) for _, sizes in here]
        for one in terms:
            for name in one:
                index.setdefault(name, len(index))
        matrix = np.zeros((len(here), len(index)))
        for i, one in enumerate(terms):
            for name, times in one.items():
                matrix[i, index[name]] = times
        seconds = np.array([p.run.seconds for p, _ in here])
        scaled = matrix / seconds[:, None]
        told = np.linalg.lstsq(scaled, np.ones(len(here)), rcond=None)[0]
        ours = np.linalg.lstsq(scaled, np.array([p.shipped for p, _ in here]) / seconds, rcond=None)[0]
        off.append(np.abs(scaled @ told - 1))
        for (name, ways, other), i in index.items():
            if name == "a":
                published[hidden, ways, other] = 1e3 * told[i]
                predicted[hidden, ways, other] = 1e3 * ours[i]
    return Layers(published, predicted, float(np.concatenate(off).mean()) if off else 0.0)


def _terms(count: int, batch: int, tensor: int, data: int, micro: int) -> dict[tuple[str, int, int], int]:
    """What equation (1) multiplies its unknowns by, for one step."""
    parts = batch // (micro * data)
    return {
        ("a", tensor, micro): parts * count,
        ("b", tensor, micro): parts,
        ("c", tensor, data): count,
        ("e", tensor, data): 1,
    }
